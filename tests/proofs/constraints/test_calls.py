"""Required calls: whatever the constraint lets through is read as calls of the tools that were offered, and only they.

Random walks through the masks, for every form, with marks that are tokens, special ones, and marks that are text.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from core.errors import InvalidRequest
from core.sampling.grammar.registry import Backend, GrammarError, build_backend
from core.sampling.grammar.vocabulary import Vocabulary
from core.text.answers.answer_form import answer_form
from core.text.answers.answer_reader import AnswerReader
from core.text.answers.call_grammar import WRITINGS, forced_calls
from core.text.tokenizer import Tokenizer
from core.types.chat import AnswerKind, AnswerPart
from core.types.grammar import Matcher
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.constraints.test_grammars import EOS, tokenizer

LONGEST = 3_000
SPARE = 64
"""Ids for marks, behind those of the tokenizer."""
MARKS = {
    "token": ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    "special": (
        *("<TOOLCALL>", "</TOOLCALL>", "<|tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>"),
        *(
            "<|END_THINKING|>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
        ),
        *("<｜tool▁calls▁end｜>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|channel|>", "<|constrain|>"),
        *("<|message|>", "<|end|>", "<|start|>"),
    ),
}
"""Some checkpoints have them as plain added tokens, and some as special ones."""


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool as clients give it."""
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


FAR = {"who": {"type": "string", "maxLength": 5}, "far": {"type": "integer", "minimum": 0, "maximum": 20}}
TOOLS = [
    tool("look", {"type": "object", "properties": FAR, "required": ["far", "who"], "additionalProperties": False}),
    tool("get.it-2", {"properties": {"é": {"enum": ["<tool_call>", "a}; b", None]}}, "additionalProperties": False}),
    {"type": "function", "function": {"name": "stop", "parameters": None}},
]


@cache
def set_up(marked: bool) -> tuple[Tokenizer, Backend, Vocabulary]:
    """A tokenizer that has all marks as tokens, or none of them."""
    hf = PreTrainedTokenizerFast(tokenizer_object=type(tokenizer()).from_str(tokenizer().to_str()), eos_token="<|eos|>")
    if marked:
        hf.add_tokens(list(MARKS["token"]))
        hf.add_tokens(list(MARKS["special"]), special_tokens=True)
    served = Tokenizer(hf)
    assert served.backend is not None
    vocabulary = Vocabulary.of(served.backend, tokenizer().get_vocab_size() + SPARE, (EOS,))
    return served, build_backend("llguidance", vocabulary), vocabulary


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    words = np.zeros(vocabulary.words, np.int32)
    assert matcher.fill(words), matcher.failure
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def walk(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, taken: list[int]) -> str:
    """The text of random tokens behind `taken`; the end half of the times that it may come."""
    served = set_up(True)[0] if set_up(True)[2] is vocabulary else set_up(False)[0]
    for token in taken:
        assert matcher.accept(token), served.decode(taken, skip_special_tokens=False)
    while True:
        assert len(taken) < LONGEST, served.decode(taken, skip_special_tokens=False)
        choices = allowed(matcher, vocabulary)
        if EOS in choices and (len(choices) == 1 or rng.random() < 0.5):
            assert matcher.accept(EOS)
            return served.decode(taken, skip_special_tokens=False)
        taken.append(rng.choice([token for token in choices if token != EOS]))
        assert matcher.accept(taken[-1])


def read(form: str, prompt: str, text: str, tools: list[dict[str, Any]]) -> list[AnswerPart]:
    known = answer_form(form, "", None)
    assert known is not None
    reader = AnswerReader(known, prompt, tools)
    return [*reader.feed(text), *reader.feed("", last=True)]


@pytest.mark.parametrize("name", ["", "get.it-2"], ids=["any", "one"])
@pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("form", WRITINGS)
def test_what_passes_is_a_thought_and_calls(form: str, marked: bool, name: str, seed: int) -> None:
    rng = random.Random(seed)
    served, backend, vocabulary = set_up(marked)
    around = WRITINGS[form].thought
    opened, closed = around or ("", "")
    schemas = {each["function"]["name"]: each["function"]["parameters"] or {"maxProperties": 0} for each in TOOLS}
    # A walk that began a thought of its own would hardly find its end.
    start = (WRITINGS[form].before + WRITINGS[form].begin).partition("{name}")[0]
    cases = [("", "")]
    if around:
        cases += [("", f"{opened}hm, 3 < 4\n{closed}"), (f"{opened}\n", f"hm{closed}")]
    counts, called = set(), set()
    for prompt, thought in cases:
        grammar = backend.compile(forced_calls(form, TOOLS, name, prompt))
        for _ in range(36 // len(cases)):
            begun = served.encode(thought or start, add_special_tokens=False)
            text = walk(grammar.matcher(), vocabulary, rng, list(begun))
            parts = read(form, prompt, text, TOOLS)
            thoughts = [part.text for part in parts if part.kind is AnswerKind.REASONING]
            assert "".join(thoughts).strip() == thought.removeprefix(opened).removesuffix(closed).strip(), text
            calls = [part.call for part in parts if part.call is not None]
            assert len(calls) + len(thoughts) == len(parts) and calls, (text, parts)
            counts.add(len(calls))
            for call in calls:
                called.add(call.name)
                arguments, schema = json.loads(call.arguments), schemas[call.name]
                assert jsonschema.Draft202012Validator(schema).is_valid(arguments), (call, schema)
                assert list(arguments) == [key for key in schema.get("properties", {}) if key in arguments]
    assert called == ({name} if name else schemas.keys())
    assert (len(counts) > 1) is (not name and WRITINGS[form].most is None)


@pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("form", [form for form in WRITINGS if WRITINGS[form].thought])
def test_a_thought_ends_with_its_first_mark(form: str, marked: bool) -> None:
    """Behind it comes a call and nothing else: neither text nor the end."""
    served, backend, vocabulary = set_up(marked)
    opened, closed = WRITINGS[form].thought or ("", "")
    matcher = backend.compile(forced_calls(form, TOOLS, "", "")).matcher()
    for token in served.encode(f"{opened}Yes or no?{closed}", add_special_tokens=False):
        assert matcher.accept(token)
    assert EOS not in allowed(matcher, vocabulary)
    assert not matcher.fork().accept(served.encode("Y", add_special_tokens=False)[0])
    newline, gap = served.encode("\n", add_special_tokens=False)[0], matcher.fork()
    assert gap.accept(newline) and gap.accept(newline) and not gap.fork().accept(newline), "two breaks at most"
    begin = WRITINGS[form].before + WRITINGS[form].begin.replace("{name}", "look")
    for token in served.encode(begin + '{"who": "Ann", "far": 7', add_special_tokens=False):
        assert matcher.accept(token)


def test_names_may_be_long_and_tools_flat() -> None:
    for tools in ([tool("a" * 64, None)], [{"name": "a", "parameters": {}}], [tool("a", {"type": ["object", "null"]})]):
        assert not forced_calls("hermes", tools, "", "").violations()


@pytest.mark.parametrize("form", ["glm4", "qwen3-coder", "checkpoint", "think", "deepseek-dsml"])
def test_forms_without_json_are_refused_by_name(form: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)chat.tool_choice.*{form}"):
        forced_calls(form, TOOLS, "", "")


@pytest.mark.parametrize(
    ("tools", "name", "field"),
    [
        (TOOLS, "other", "chat.tool_choice.name"),
        ([*TOOLS, {}], "", "chat.tools[3]"),
        ([*TOOLS, {"function": 1}], "", "chat.tools[3]"),
        ([{"function": 1}], "look", "chat.tool_choice.name"),
        ([tool("a b", None)], "", "chat.tools[0]"),
        ([tool('a"b', None)], "", "chat.tools[0]"),
        ([tool("a" * 65, None)], "", "chat.tools[0]"),
        ([tool("a", {"type": "string"})], "", "chat.tools[0]"),
        ([tool("a", {"type": ["string", "null"]})], "", "chat.tools[0]"),
        *(([tool("a", {"type": odd})], "", "chat.tools[0]") for odd in (5, None, True, "objectionable", {"object": 1})),
        ([{"function": {"name": 5}}], "", "chat.tools[0]"),
        ([{"function": {"name": "a", "parameters": []}}], "", "chat.tools[0]"),
        ([tool("a", {"description": "x" * 140_000})], "", "chat.tools"),
        ([tool("a", {"const": json.loads("[" * 65 + "]" * 65)})], "", "chat.tools"),
    ],
)
def test_tools_that_cannot_be_called_are_named(tools: list[dict[str, Any]], name: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        forced_calls("hermes", tools, name, "")
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize(
    "schema",
    [{"type": ["object", "null"]}, {"anyOf": [{"required": ["a"]}]}, {"x-guidance": {"whitespace_flexible": True}}, {}],
)
def test_arguments_are_objects_whatever_the_schema_leaves_open(schema: dict[str, Any]) -> None:
    served, backend, _ = set_up(True)
    matcher = backend.compile(forced_calls("mistral-args", [tool("a", schema)], "", "")).matcher()
    for token in served.encode("[TOOL_CALLS]a[ARGS]", add_special_tokens=False):
        assert matcher.accept(token)
    for text in ("null", "[", "1", " ", "\n"):
        assert not matcher.fork().accept(served.encode(text, add_special_tokens=False)[0]), text
    assert matcher.accept(served.encode("{", add_special_tokens=False)[0])
    assert not matcher.fork().accept(served.encode("\n", add_special_tokens=False)[0]), "white space is as we write it"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_library_names_the_tools_that_it_cannot_enforce(name: str) -> None:
    vocabulary = set_up(True)[2]
    constraint = forced_calls("hermes", [tool("a", {"properties": {"x": {"not": {}, "unevaluatedItems": 1}}})], "", "")
    assert constraint.field == "chat.tools"
    with pytest.raises(GrammarError):
        build_backend(name, vocabulary).compile(constraint)
