"""Constraints by xgrammar: everything that does not depend on the output is worked out at compile time, so that a mask
takes 10 µs; compiling takes longer, and has no limit of its own but the trial in another process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import xgrammar

from core.sampling.grammar.registry import GrammarError
from core.sampling.grammar.utf8 import JSON, TEXT, Utf8
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Matcher, Words

SEPARATORS = (",", ":")
NOT_ALLOWED = "the token is not allowed here"


def build(vocabulary: Vocabulary) -> XGrammar:
    """A backend for `vocabulary`."""
    return XGrammar(vocabulary)


class XGrammar:
    """The backend. Its own cache is off: ours has one bound for all backends."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        told = tokenizers.Tokenizer.from_str(vocabulary.tokenizer_json)
        special = {index for index, token in told.get_added_tokens_decoder().items() if token.special}
        # A token with empty text can be required by no grammar.
        tokens = [""] * vocabulary.size
        for token, index in told.get_vocab(with_added_tokens=True).items():
            tokens[index] = "" if index in special else token
        found = xgrammar.TokenizerInfo._detect_metadata_from_hf(vocabulary.tokenizer_json)
        info = xgrammar.TokenizerInfo(
            tokens,
            found["vocab_type"],
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.end_ids),
            add_prefix_space=found["add_prefix_space"],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._utf8 = Utf8(info.decoded_vocab, vocabulary.words)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile `constraint`, without the GIL. Raises GrammarError."""
        if constraint.kind not in _COMPILERS:
            raise GrammarError("is enforced by llguidance alone; the server has xgrammar")
        try:
            compiled = _COMPILERS[constraint.kind](self._compiler, constraint.source)
        except Exception as error:  # the library raises RuntimeError and more
            raise GrammarError(str(error)) from error
        # Strings with maxLength or a pattern let raw control characters through, which no JSON text may hold (0.2.8);
        # between the parts of a value there is no white space anyway.
        start = JSON if constraint.kind is ConstraintKind.JSON_SCHEMA else TEXT
        return CompiledGrammar(compiled, constraint.field, self.vocabulary, self._utf8, start)


class CompiledGrammar:
    """A `Grammar` compiled by xgrammar."""

    def __init__(self, compiled: Any, field: str, vocabulary: Vocabulary, utf8: Utf8, start: int) -> None:
        """`start`: the state of `utf8` at which outputs begin."""
        self.field = field
        self._compiled = compiled
        self._utf8 = utf8
        self._start = start
        self._vocabulary = vocabulary
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)

    @property
    def words(self) -> int:
        """Length of a mask in words."""
        return self._vocabulary.words

    def matcher(self) -> Matcher:
        """A new matcher of the library at its start."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary, self._utf8, self._start)

    def accept_all(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        """Accept `tokens[i]` in `matchers[i]`, in one call: 2 µs each with the GIL held."""
        ours = _own(matchers)
        accepted: list[bool] = self._batch.batch_accept_token([matcher.inner for matcher in ours], list(tokens))
        return [matcher.took(token, fine) for matcher, token, fine in zip(ours, tokens, accepted, strict=True)]

    def fill_all(self, matchers: Sequence[Matcher], words: Words) -> npt.NDArray[np.bool_]:
        """Fill all masks in one call: 0.2 µs each at 704 tokens with the GIL held, so on this thread alone; bool[G]."""
        ours = _own(matchers)
        # Without the rows that have ended: one of them makes the library refuse the whole call.
        places = [place for place, matcher in enumerate(ours) if not matcher.has_ended]
        masks = np.zeros((len(ours), -(-self._vocabulary.size // 32)), np.int32)
        try:
            self._batch.batch_fill_next_token_bitmask([ours[place].inner for place in places], masks, places)
        except RuntimeError:
            # One of them gave up: find out which.
            return np.array([matcher.fill(words[i]) for i, matcher in enumerate(matchers)], np.bool_)
        words[:, : masks.shape[1]] = masks
        self._vocabulary.cut(words)
        # In place, row by row: all at once would copy them all thrice (0.8 ms, not 0.1, for 64 rows of 150,000 tokens).
        for place in places:
            words[place] &= ours[place].utf8_mask
        some: npt.NDArray[np.bool_] = np.any(words, axis=1)
        return some


class XGrammarMatcher:
    """A `Matcher` around one of the library's."""

    def __init__(self, inner: Any, vocabulary: Vocabulary, utf8: Utf8, state: int) -> None:
        """`state`: of `utf8`, where the output stands."""
        self.inner = inner
        self._state = state
        self.utf8_mask: Words = utf8.masks[state]
        """int32[W]: bits of the tokens that keep the output UTF-8."""
        self._utf8 = utf8
        self._vocabulary = vocabulary
        self.problem: str | None = None
        self.has_ended = False
        """Whether an end token was accepted. Kept here because asking the library takes 0.4 µs."""

    def fill(self, words: Words) -> bool:
        """Set the bits of tokens that may come next. Returns whether there is any."""
        if self.has_ended:
            return False
        try:
            self.inner.fill_next_token_bitmask(words[None, : -(-self._vocabulary.size // 32)])
        except RuntimeError as error:
            self.problem = str(error)
            return False
        self._vocabulary.cut(words)
        words &= self.utf8_mask
        return bool(words.any())

    def accept(self, token: int) -> bool:
        """Move on past `token`; False if it is not allowed."""
        return self.took(token, self.inner.accept_token(token))

    def took(self, token: int, accepted: bool) -> bool:
        """Note what the library made of `token`. Returns whether it was allowed, by UTF-8 too."""
        if not accepted or not self.utf8_mask[token >> 5] >> (token & 31) & 1:
            self.problem = NOT_ALLOWED
            return False
        self.has_ended = token in self._vocabulary.end_ids
        if not self.has_ended:
            self._state = self._utf8.after[self._state][token]
            self.utf8_mask = self._utf8.masks[self._state]
        return True

    def fork(self) -> Matcher:
        """A copy in the same state: 2 to 14 µs."""
        found = XGrammarMatcher(self.inner.fork(), self._vocabulary, self._utf8, self._state)
        found.problem, found.has_ended = self.problem, self.has_ended
        return found

    @property
    def is_terminated(self) -> bool:
        """Whether an end token was accepted, or only an end token may follow."""
        return self.has_ended or (bool(self.inner.is_completed()) and self._ends_here())

    @property
    def failure(self) -> str | None:
        """The library's error, or `NOT_ALLOWED`; None while it can go on."""
        return self.problem

    @property
    def gave_up(self) -> bool:
        """Whether the problem is the library's own, not a forbidden token."""
        return self.problem is not None and self.problem != NOT_ALLOWED

    def _ends_here(self) -> bool:
        """Whether only an end token may follow."""
        words = np.zeros((1, -(-self._vocabulary.size // 32)), np.int32)
        self.inner.fill_next_token_bitmask(words)
        for end in self._vocabulary.end_ids:
            words[0, end >> 5] &= ~np.uint32(1 << (end & 31)).astype(np.int32)
        return not words.any()


def _own(matchers: Sequence[Matcher]) -> list[XGrammarMatcher]:
    ours = []
    for matcher in matchers:
        assert isinstance(matcher, XGrammarMatcher), "one engine has one library"
        ours.append(matcher)
    return ours


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
