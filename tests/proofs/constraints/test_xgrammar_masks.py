"""What the backend for xgrammar makes of that library's masks, over a stand-in: it need not be installed here."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel

from core.sampling.grammar.registry import BACKENDS, Backend, GrammarError, build_backend
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Words
from tests.support.fakes.grammar_library import library

WORDS = ["a", "b", "\n", "x\ty", "é", "end"]
END = WORDS.index("end")
WIDTH = 40
SCHEMA, REGEX = (Constraint(kind, "{}") for kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The real backend, imported anew over the stand-in."""
    _, module = BACKENDS["xgrammar"]
    monkeypatch.setitem(sys.modules, "xgrammar", library())
    monkeypatch.delitem(sys.modules, module, raising=False)
    tokenizer = tokenizers.Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "a"))
    made = build_backend("xgrammar", Vocabulary.of(tokenizer, WIDTH, (END,)))
    # Another test must not find a backend over the stand-in.
    del sys.modules[module]
    return made


def tokens(words: Words) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return found


def test_json_holds_no_raw_control_character_and_other_texts_may(backend: Backend) -> None:
    """Row by row and all at once: strings with a bound on their length let them through."""
    texts = [backend.compile(each) for each in (SCHEMA, REGEX)]
    allowed = [[token for token in range(WIDTH) if token not in (2, 3)], list(range(WIDTH))]
    words = np.zeros((2, texts[0].words), np.int32)
    assert texts[0].fill_all([text.matcher() for text in texts], words).all()
    assert [tokens(row) for row in words] == allowed
    for text, wanted in zip(texts, allowed, strict=True):
        alone = np.zeros(text.words, np.int32)
        assert text.matcher().fill(alone) and tokens(alone) == wanted


def test_a_row_that_has_ended_takes_no_other_with_it(backend: Backend) -> None:
    grammar = backend.compile(REGEX)
    ended, going = grammar.matcher(), grammar.matcher()
    assert list(grammar.accept_all([ended, going], [END, 0])) == [True, True]
    assert (ended.is_terminated, going.is_terminated) == (True, False)
    words = np.zeros((2, grammar.words), np.int32)
    assert grammar.fill_all([ended, going], words).tolist() == [False, True]
    assert tokens(words[1]) == list(range(WIDTH))
    assert not ended.accept(0) and ended.failure is not None and going.failure is None


def test_an_end_goes_along_with_a_fork(backend: Backend) -> None:
    matcher = backend.compile(REGEX).matcher()
    assert matcher.accept(0)
    before = matcher.fork()
    assert matcher.accept(END) and not matcher.fill(np.zeros(2, np.int32))
    assert matcher.fork().is_terminated and not matcher.fork().fill(np.zeros(2, np.int32))
    assert not before.is_terminated and before.fill(np.zeros(2, np.int32))


def test_what_the_library_refuses_is_a_grammar_error(backend: Backend) -> None:
    with pytest.raises(GrammarError, match="an empty grammar"):
        backend.compile(Constraint(ConstraintKind.EBNF, ""))
