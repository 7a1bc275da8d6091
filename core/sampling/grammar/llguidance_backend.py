"""Constraints by llguidance: an Earley parser over lazily built lexers, with fuel for every part of the work.

Its limits make most bombs fail instead of burn: `(a{1000}){1000}` takes 2.4 s and 250 MB for its first mask with the
library's defaults, 0.2 s and 48 MB with these. A call for one row of an ambiguous grammar grows with the square of the
items in a row, of which an `anyOf` of 200 objects has 200: 300 ms with the default of 2,000, some milliseconds with 300
(at 700 tokens). What has no fuel (`multipleOf` a million: 26 s) is what the trial in another process is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from core.sampling.grammar.mask_pool import MaskPool, Pace, PacedRow
from core.sampling.grammar.registry import GrammarError
from core.sampling.grammar.tag_grammar import TagGrammar
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Matcher, Words

LIMITS = LLParserLimits(
    max_items_in_row=300,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=20_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

JSON_OPTIONS: llguidance._lib.JsonCompileOptions = {
    # Free whitespace is where weak models get lost: it never has to end.
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
}

NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of the library's error for a token that the mask forbids; all its other errors are limits (1.9.1)."""

_REGEX_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/")


def build(vocabulary: Vocabulary) -> LLGuidance:
    """A backend for `vocabulary`."""
    return LLGuidance(vocabulary)


class LLGuidance:
    """The backend; immutable, so any thread may compile."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = LLTokenizer(
            vocabulary.tokenizer_json, n_vocab=vocabulary.size, eos_token=list(vocabulary.end_ids)
        )
        self.pool = MaskPool()
        grammar = TagGrammar(vocabulary.marks, vocabulary.end_ids)
        self._sources: dict[ConstraintKind, Callable[[str], str]] = {
            **_SOURCES,
            ConstraintKind.CALLS: lambda source: LLMatcher.grammar_from_lark(grammar.calls(source)),
            ConstraintKind.STRUCTURAL_TAGS: lambda source: LLMatcher.grammar_from_lark(grammar.tags(source)),
        }

    def compile(self, constraint: Constraint) -> LLGrammar:
        """Compile `constraint`, without the GIL. Raises GrammarError."""
        try:
            source = self._sources[constraint.kind](constraint.source)
        except Exception as error:  # the converter raises whatever it trips over
            raise GrammarError(str(error)) from error
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return LLGrammar(matcher, constraint.field, self.vocabulary, self.pool)


class LLGrammar:
    """A `Grammar`: a matcher at its start, of which requests get copies (0.7 µs each)."""

    def __init__(self, start: LLMatcher, field: str, vocabulary: Vocabulary, pool: MaskPool) -> None:
        self.field = field
        self._start = start
        self._pool = pool
        self._vocabulary = vocabulary
        self._pace = Pace()

    @property
    def words(self) -> int:
        """Length of a mask in words."""
        return self._vocabulary.words

    def matcher(self) -> Matcher:
        """A copy of the matcher at its start."""
        return LLGuidanceMatcher(PacedRow(self._start.deep_copy(), self._pace), self._vocabulary)

    def accept_all(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        """Accept `tokens[i]` in `matchers[i]`: end tokens here, all others through the pool."""
        ends = self._vocabulary.end_ids
        rows = _rows(matchers)
        texts = [i for i, token in enumerate(tokens) if token not in ends]
        if len(texts) == len(rows):
            return self._pool.accept(rows, tokens)
        accepted = [token in ends and matcher.accept(token) for matcher, token in zip(matchers, tokens, strict=True)]
        found = self._pool.accept([rows[i] for i in texts], [tokens[i] for i in texts])
        for i, fine in zip(texts, found, strict=True):
            accepted[i] = fine
        return accepted

    def fill_all(self, matchers: Sequence[Matcher], words: Words) -> npt.NDArray[np.bool_]:
        """Fill the masks through the pool, and clear the bits of ids that the model cannot sample; bool[G]."""
        assert words.dtype == np.int32 and words.flags["C_CONTIGUOUS"], (words.dtype, words.strides)
        rows = _rows(matchers)
        size = -(-self._vocabulary.size // 32)
        masks = np.zeros((len(rows), size), np.int32)
        self._pool.fill(rows, masks)
        words[:, :size] = masks
        self._vocabulary.cut(words)
        fine = np.array([not row.inner.is_error() for row in rows], np.bool_)
        return fine & words.any(axis=1)


class LLGuidanceMatcher:
    """A `Matcher` around one of the library's, which handles end tokens itself."""

    def __init__(self, row: PacedRow, vocabulary: Vocabulary) -> None:
        self.row = row
        self.inner = row.inner
        self._vocabulary = vocabulary
        self._has_ended = False

    def fill(self, words: Words) -> bool:
        """Set the bits of tokens that may come next. Returns whether there is any."""
        assert words.dtype == np.int32 and words.flags["C_CONTIGUOUS"], (words.dtype, words.strides)
        if self._has_ended:
            return False
        # The library insists on the exact size of its own masks.
        size = -(-self._vocabulary.size // 32)
        self.inner.unsafe_compute_mask_ptr(words.ctypes.data, size * 4)
        self._vocabulary.cut(words)
        return not self.inner.is_error() and bool(words.any())

    def accept(self, token: int) -> bool:
        """Move on past `token`. An end token is allowed once, where the text so far is complete."""
        if token in self._vocabulary.end_ids:
            self._has_ended = not self._has_ended and self.inner.is_accepting()
            return self._has_ended
        return not self._has_ended and self.inner.consume_token(token)

    def fork(self) -> Matcher:
        """A copy in the same state: 2 µs at first, 38 µs behind 2,000 tokens."""
        found = LLGuidanceMatcher(PacedRow(self.inner.deep_copy(), self.row.pace), self._vocabulary)
        found._has_ended = self._has_ended
        return found

    @property
    def is_terminated(self) -> bool:
        """Whether an end token was accepted, or the library has stopped without an error."""
        return self._has_ended or (self.inner.is_stopped() and not self.inner.is_error())

    @property
    def failure(self) -> str | None:
        """The library's error, if there is one."""
        return self.inner.get_error() if self.inner.is_error() else None

    @property
    def gave_up(self) -> bool:
        """Whether the error is a limit of the library, not a forbidden token."""
        return self.inner.is_error() and NOT_ALLOWED not in self.inner.get_error()


def _rows(matchers: Sequence[Matcher]) -> list[PacedRow]:
    rows = []
    for matcher in matchers:
        assert isinstance(matcher, LLGuidanceMatcher), "one engine has one library"
        rows.append(matcher.row)
    return rows


def _schema(source: str) -> str:
    return LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS)


def _choice(source: str) -> str:
    return LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(source))))


def _literal(text: str) -> str:
    return "".join("\\" + char if char in _REGEX_SPECIAL else char for char in text)


def _ebnf(source: str) -> str:
    return LLMatcher.grammar_from_lark(gbnf_to_lark(source))


_SOURCES = {
    ConstraintKind.JSON_SCHEMA: _schema,
    ConstraintKind.REGEX: LLMatcher.grammar_from_regex,
    ConstraintKind.EBNF: _ebnf,
    ConstraintKind.CHOICE: _choice,
}
