"""Constraints by xgrammar: everything that does not depend on the output is worked out at compile time, so that a mask
takes 10 µs; compiling takes longer, and has no limit of its own but the trial in another process.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tokenizers
import xgrammar

from core.sampling.grammar.registry import GrammarError
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Matcher, Words

SEPARATORS = (",", ":")


def build(vocabulary: Vocabulary) -> XGrammar:
    """A backend for `vocabulary`."""
    return XGrammar(vocabulary)


class XGrammar:
    """The backend. Its own cache is off: ours has one bound for all backends."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        ids = tokenizers.Tokenizer.from_str(vocabulary.tokenizer_json).get_vocab(with_added_tokens=True)
        tokens = [""] * vocabulary.size
        for token, index in ids.items():
            tokens[index] = token
        found = xgrammar.TokenizerInfo._detect_metadata_from_hf(vocabulary.tokenizer_json)
        info = xgrammar.TokenizerInfo(
            tokens,
            found["vocab_type"],
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.end_ids),
            add_prefix_space=found["add_prefix_space"],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """See `Backend.compile`; drops the GIL for the time it takes."""
        try:
            return CompiledGrammar(_COMPILERS[constraint.kind](self._compiler, constraint.source), self.vocabulary)
        except Exception as error:  # the library raises RuntimeError and more
            raise GrammarError(str(error)) from error


class CompiledGrammar:
    """See `Grammar`."""

    def __init__(self, compiled: Any, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary

    @property
    def words(self) -> int:
        """See `Grammar.words`."""
        return self._vocabulary.words

    def matcher(self) -> Matcher:
        """See `Grammar.matcher`."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary)


class XGrammarMatcher:
    """See `Matcher`."""

    def __init__(self, inner: Any, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._failure: str | None = None

    def fill(self, words: Words) -> bool:
        """See `Matcher.fill`."""
        if self._inner.is_terminated():
            return False
        try:
            self._inner.fill_next_token_bitmask(words[None, : -(-self._vocabulary.size // 32)])
        except RuntimeError as error:
            self._failure = str(error)
            return False
        self._vocabulary.cut(words)
        return bool(words.any())

    def accept(self, token: int) -> bool:
        """See `Matcher.accept`."""
        accepted: bool = self._inner.accept_token(token)
        if not accepted:
            self._failure = "the token is not allowed here"
        return accepted

    def rollback(self, count: int) -> None:
        """See `Matcher.rollback`."""
        self._inner.rollback(count)

    @property
    def is_terminated(self) -> bool:
        """See `Matcher.is_terminated`."""
        return bool(self._inner.is_terminated()) or (bool(self._inner.is_completed()) and self._ends_here())

    @property
    def failure(self) -> str | None:
        """See `Matcher.failure`."""
        return self._failure

    def _ends_here(self) -> bool:
        """Whether only an end token may follow."""
        words = np.zeros(self._vocabulary.words, np.int32)
        self._inner.fill_next_token_bitmask(words[None, : -(-self._vocabulary.size // 32)])
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return set(allowed.tolist()) <= set(self._vocabulary.end_ids)


def _schema(compiler: Any, source: str) -> Any:
    # Not strict: what the schema does not forbid is allowed, as the standard says and the other backend does.
    return compiler.compile_json_schema(source, any_whitespace=False, separators=SEPARATORS, strict_mode=False)


def _regex(compiler: Any, source: str) -> Any:
    return compiler.compile_regex(source)


def _ebnf(compiler: Any, source: str) -> Any:
    return compiler.compile_grammar(source)


def _choice(compiler: Any, source: str) -> Any:
    return _ebnf(compiler, "root ::= " + " | ".join(map(json.dumps, json.loads(source))))


_COMPILERS = {
    ConstraintKind.JSON_SCHEMA: _schema,
    ConstraintKind.REGEX: _regex,
    ConstraintKind.EBNF: _ebnf,
    ConstraintKind.CHOICE: _choice,
}
