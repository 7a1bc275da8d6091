"""Structural tags: what the grammar lets through is what a plain reading of the tags lets through."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from core.sampling.grammar.registry import GrammarError, build_backend
from core.sampling.grammar.tag_grammar import TagGrammar
from core.types.constraint import Constraint, ConstraintKind
from core.types.structural_tags import StructuralTag, StructuralTags
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.constraints.test_calls import set_up
from tests.proofs.constraints.test_grammars import EOS

SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
NAMED = {"type": "object", "properties": {"b": {"enum": ["<f=", "é"]}, "a": {"type": "boolean"}}}
TEXTS = StructuralTags(
    (StructuralTag("<f=a>", SMALL, "</f>"), StructuralTag("<f=b>", NAMED, "</f>"), StructuralTag("call ", True, "")),
    ("<f=", "call "),
)
MARKS = StructuralTags(
    (
        StructuralTag('<tool_call>{"n": ', SMALL, "}</tool_call>"),
        StructuralTag("<|channel|>to=b", NAMED, "<|end|>"),
        StructuralTag("[ARGS]", SMALL, ""),
        StructuralTag("call ", SMALL, ";"),
    ),
    ("<tool_call>", "<|channel|>to", "[ARGS]", "call "),
)
PARTS = {
    "TEXTS": [
        "abc",
        "<f=a>1</f>",
        '<f=b>{"b": "é", "a": true}</f>',
        "<f",
        "=",
        "call 12",
        "call [1, 2]",
        "<f=c>",
        "<think>",
    ],
    "MARKS": [
        *(
            "abc",
            '<tool_call>{"n": 7}</tool_call>',
            "<tool_call>",
            '<|channel|>to=b{"b": "<f="}<|end|>',
            "</tool_call>",
        ),
        *("[ARGS]3", "call 12;", "call 1;", "<think>", "<|end|>"),
    ],
}


def meets(told: StructuralTags, text: str) -> bool:
    """Whether `text` is free text and tags; found by looking for triggers from the left."""
    place = count = 0
    while True:
        found = [(text.index(trigger, place), trigger) for trigger in told.triggers if trigger in text[place:]]
        if not found or (told.stop_after_first and count):
            rest = text[place:]
            return not (told.at_least_one and not count) and not (told.stop_after_first and count and rest)
        start, _ = min(found)
        if told.at_least_one and not count and start:
            return False
        ends = [end for tag in told.tags if (end := _end_of(tag, text, start)) is not None]
        if not ends:
            return False
        (place,), count = ends, count + 1


def _end_of(tag: StructuralTag, text: str, start: int) -> int | None:
    """Where `tag` ends that begins at `start`; None if it does not."""
    if not text.startswith(tag.begin, start):
        return None
    begun = start + len(tag.begin)
    try:
        value, end = json.JSONDecoder().raw_decode(text, begun)
    except ValueError:
        return None
    fits = tag.schema is True or jsonschema.Draft202012Validator(tag.schema).is_valid(value)
    as_written = json.dumps(value, ensure_ascii=False) == text[begun:end]
    return end + len(tag.end) if fits and as_written and text.startswith(tag.end, end) else None


def lets_through(told: StructuralTags, text: str, marked: bool) -> bool:
    """Whether the grammar accepts the tokens of `text`, and the end behind them."""
    served, backend, _ = set_up(marked)
    constraint = Constraint(ConstraintKind.STRUCTURAL_TAGS, told.source)
    assert constraint.violations() == []
    matcher = backend.compile(constraint).matcher()
    return all(map(matcher.accept, served.encode(text, add_special_tokens=False))) and matcher.accept(EOS)


FLAGS = [(False, False), (False, True), (True, False), (True, True)]
EXAMPLES = [
    "",
    "abc",
    "abc<f=a>1</f>",
    "<f=a>1</f>",
    "<f=a>1</f>abc",
    "<f=a>1</f><f=a>1</f>",
    "abc<f=a>1</f>abc",
    "<f=b",
]
XGRAMMAR = {
    (False, False): [1, 1, 1, 1, 1, 1, 1, 0],
    (False, True): [1, 1, 1, 1, 0, 0, 0, 0],
    (True, False): [0, 0, 0, 1, 1, 1, 0, 0],
    (True, True): [0, 0, 0, 1, 0, 0, 0, 0],
}
"""What xgrammar 0.2.8 accepts of EXAMPLES, by `at_least_one` and `stop_after_first`."""


@pytest.mark.parametrize("flags", FLAGS)
def test_the_notation_means_what_it_means_to_xgrammar(flags: tuple[bool, bool]) -> None:
    told = StructuralTags((StructuralTag("<f=a>", {"type": "integer"}, "</f>"),), ("<f=",), *flags)
    assert [lets_through(told, text, False) for text in EXAMPLES] == list(map(bool, XGRAMMAR[flags]))
    assert [meets(told, text) for text in EXAMPLES] == list(map(bool, XGRAMMAR[flags]))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", PARTS)
def test_random_texts_pass_as_they_are_read(name: str, marked: bool, flags: tuple[bool, bool], seed: int) -> None:
    rng = random.Random(seed)
    plain = {"TEXTS": TEXTS, "MARKS": MARKS}[name]
    told = StructuralTags(plain.tags, plain.triggers, *flags)
    outcomes = set()
    for _ in range(150):
        text = "".join(rng.choices(PARTS[name], k=rng.randint(1, 4)))
        outcomes.add(meets(told, text))
        assert lets_through(told, text, marked) is meets(told, text), text
    assert outcomes == {True, False}


def test_a_text_in_pieces_has_the_tokens_that_encoding_finds(seed: int) -> None:
    """Also where one added token begins as another does."""
    served, _, vocabulary = set_up(True)
    marks = dict(vocabulary.marks) | {"<tool_call>s": 900, "call": 901}
    grammar, rng = TagGrammar(marks, (EOS,)), random.Random(seed)
    assert grammar.pieces("a<tool_call>s<tool_call>b") == ["a", 900, marks["<tool_call>"], "b"]
    grammar = TagGrammar(vocabulary.marks, (EOS,))
    for _ in range(100):
        text = "".join(rng.choices(["<tool_call>", "s", "call", "<|end|>", "<|", "a", "é", "<"], k=rng.randint(0, 9)))
        ids = [[each] if isinstance(each, int) else served.encode(each, False) for each in grammar.pieces(text)]
        assert [token for each in ids for token in each] == served.encode(text, False), text
    with pytest.raises(ValueError, match="ends outputs"):
        grammar.pieces("a<|eos|>b")
    assert TagGrammar({}, ()).pieces("a</s>") == ["a</s>"] and TagGrammar({}, ()).pieces("") == []


def tags(*begins: str, triggers: Any = ("<f",), schema: Any = True, end: str = "") -> StructuralTags:
    return StructuralTags(tuple(StructuralTag(begin, schema, end) for begin in begins), tuple(triggers))


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (tags(), "1 to 128 tags"),
        (tags(*["<f"] * 129), "1 to 128 tags"),
        (tags("<f", triggers=()), "1 to 128 triggers"),
        (tags("<f", triggers=["<f", ""]), "empty trigger"),
        (tags("<f", "f"), "tags[1].begin"),
        (tags("<fg", triggers=["<f", "<fg"]), "tags[0].begin"),
        (tags("<f" + "x" * 1_023), "1024 characters"),
        (tags("<f", triggers=["<f", "call"]), "triggers[1], which begins no tag"),
        (tags("<f", end=1), "1024 characters"),  # type: ignore[arg-type]
        (tags("<f", schema=False), "JSON objects"),
        (tags("<f", schema=[]), "JSON objects"),
        (tags("<f", schema={"a": json.loads("[" * 65 + "]" * 65)}), "levels"),
        (tags("<f", schema={"description": "x" * 140_000}), "131072 characters"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_compiled(told: StructuralTags, says: str) -> None:
    found = Constraint(ConstraintKind.STRUCTURAL_TAGS, told.source).violations()
    assert [each.field for each in found] == ["constraint.structural_tags"] and says in found[0].description


def test_as_many_and_as_long_as_may_be() -> None:
    for told in (
        tags(*["<f"] * 128),
        tags("<f" + "x" * 1_022),
        tags("<f", schema={"a": json.loads("[" * 62 + "]" * 62)}),
    ):
        assert not Constraint(ConstraintKind.STRUCTURAL_TAGS, told.source).violations()


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (tags("a<tool_call>", triggers=["a<tool_call>"]), "behind its beginning"),
        (tags("<f", end="<|eos|>"), "ends outputs"),
        (tags("<f", schema={"unevaluatedItems": False}), "unevaluatedItems"),
    ],
)
def test_what_the_library_cannot_enforce_is_refused(told: StructuralTags, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        set_up(True)[1].compile(Constraint(ConstraintKind.STRUCTURAL_TAGS, told.source))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_library_without_them_says_which_has_them(name: str) -> None:
    backend = build_backend(name, set_up(True)[2])
    constraint = Constraint(ConstraintKind.STRUCTURAL_TAGS, TEXTS.source)
    if name == "llguidance":
        assert backend.compile(constraint).field == "constraint.structural_tags"
        return
    with pytest.raises(GrammarError, match="llguidance alone"):
        backend.compile(constraint)
