"""Stands for xgrammar where that is not installed: the calls that the backend makes, over grammars that allow all.

A mask has every bit set until an end token was taken. That the calls fit xgrammar itself is for the tests that are
skipped where it is absent.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import numpy as np


class TokenizerInfo:
    """Knows the bytes of each token, here those of its own text."""

    def __init__(
        self, tokens: list[str], vocab_type: str, *, vocab_size: int, stop_token_ids: list[int], add_prefix_space: bool
    ) -> None:
        assert vocab_type == "raw" and not add_prefix_space and len(tokens) == vocab_size
        self.decoded_vocab = [token.encode() for token in tokens]
        self.ends = frozenset(stop_token_ids)

    @staticmethod
    def _detect_metadata_from_hf(source: str) -> dict[str, Any]:
        assert json.loads(source)["model"], "a serialised tokenizer"
        return {"vocab_type": "raw", "add_prefix_space": False}


class GrammarCompiler:
    """Compiles every text to its end tokens; an empty one is an error."""

    def __init__(self, info: TokenizerInfo, *, max_threads: int, cache_enabled: bool) -> None:
        assert max_threads == 1 and not cache_enabled
        self._ends = info.ends

    def compile_regex(self, source: str) -> frozenset[int]:
        if not source:
            raise RuntimeError("an empty grammar")
        return self._ends

    compile_grammar = compile_regex

    def compile_json_schema(self, source: str, **options: Any) -> frozenset[int]:
        assert set(options) == {"any_whitespace", "separators", "strict_mode"}
        return self.compile_regex(source)


class GrammarMatcher:
    """Takes any token until one ends it."""

    def __init__(self, ends: frozenset[int]) -> None:
        self._ends = ends
        self._taken: list[int] = []

    @property
    def has_ended(self) -> bool:
        return bool(self._taken) and self._taken[-1] in self._ends

    def accept_token(self, token: int) -> bool:
        if self.has_ended:
            return False
        self._taken.append(token)
        return True

    def fork(self) -> GrammarMatcher:
        made = GrammarMatcher(self._ends)
        made._taken = [*self._taken]
        return made

    def is_completed(self) -> bool:
        return self.has_ended

    def fill_next_token_bitmask(self, masks: np.ndarray, place: int = 0) -> None:
        if self.has_ended:
            raise RuntimeError("the matcher has terminated")
        masks[place] = -1


class BatchGrammarMatcher:
    """Refuses all rows when one of them has ended, as xgrammar does."""

    def __init__(self, *, max_threads: int) -> None:
        assert max_threads == 1

    def batch_accept_token(self, matchers: list[GrammarMatcher], tokens: list[int]) -> list[bool]:
        return [matcher.accept_token(token) for matcher, token in zip(matchers, tokens, strict=True)]

    def batch_fill_next_token_bitmask(
        self, matchers: list[GrammarMatcher], masks: np.ndarray, places: list[int]
    ) -> None:
        for matcher, place in zip(matchers, places, strict=True):
            matcher.fill_next_token_bitmask(masks, place)


def library() -> ModuleType:
    """The module, to be put where the import finds it."""
    made = ModuleType("xgrammar")
    for each in (TokenizerInfo, GrammarCompiler, GrammarMatcher, BatchGrammarMatcher):
        setattr(made, each.__name__, each)
    return made
