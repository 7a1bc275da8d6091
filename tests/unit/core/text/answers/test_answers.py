"""Answers in every form, cut anywhere, whole and broken."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from core.errors import ConfigError
from core.model_config import ANSWER_FORMS
from core.text.answers.answer_form import AnswerForm, answer_form
from core.text.answers.answer_reader import AnswerReader
from core.text.answers.known_forms import KNOWN_FORMS
from core.types.chat import AnswerPart
from tests.unit.core.text.answers.written import ARGUMENTS, HERMES, TOOLS, WRITTEN, Written, joined, said, thought

LLAMA = '{"name": "look", "parameters": ' + ARGUMENTS + "}"


def form(name: str) -> AnswerForm:
    found = answer_form(name, "", None)
    assert found is not None
    return found


def read(
    name: str, pieces: Iterable[str], prompt: str = "", tools: Sequence[dict[str, Any]] = tuple(TOOLS)
) -> list[AnswerPart]:
    reader = AnswerReader(form(name), prompt, tools)
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return joined([*parts, *reader.feed("", last=True)])


def told(parts: list[AnswerPart]) -> list[Any]:
    """Texts as they are, calls as (name, arguments)."""
    return [part if part.call is None else (part.call.name, json.loads(part.call.arguments)) for part in parts]


CALL = ("look", json.loads(ARGUMENTS))


@pytest.mark.parametrize("written", WRITTEN, ids=lambda written: written.form)
def test_each_form_is_known_and_read_wherever_it_is_cut(written: Written) -> None:
    known = answer_form("auto", written.template, None)
    assert known is not None and known.name == written.form
    wanted = [thought("hm"), said("Yes."), CALL, CALL]
    assert told(read(written.form, [written.text])) == wanted
    assert told(read(written.form, written.text)) == wanted, "character by character"
    for seed in range(20):
        draw, rest, pieces = random.Random(seed), written.text, []
        while rest:
            size = draw.randint(1, 12)
            pieces.append(rest[:size])
            rest = rest[size:]
        assert told(read(written.form, pieces)) == wanted, seed


def test_every_form_is_a_value_of_the_setting_and_is_tried_here() -> None:
    names = [known.name for known in KNOWN_FORMS]
    assert ["auto", "none", "checkpoint", *names] == list(ANSWER_FORMS)
    assert {written.form for written in WRITTEN} | {"llama3", "think"} == set(names)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (LLAMA, [CALL]),
        ("<|python_tag|>" + LLAMA + "; " + LLAMA, [CALL, CALL]),
        (f"Write {LLAMA} there", [said(f"Write {LLAMA} there")]),
        ('{"name": "look", "parameters": {"who": "a}; b"}}', [("look", {"who": "a}; b"})]),
    ],
)
def test_llama_calls_with_the_whole_answer(text: str, wanted: list[Any]) -> None:
    assert told(read("llama3", text)) == wanted == told(read("llama3", [text]))


@pytest.mark.parametrize(
    ("prompt", "text", "wanted"),
    [
        ("<|assistant|><think>\n", "hm\n</think>\n\nyes", [thought("hm"), said("yes")]),
        ("<|assistant|><think>", "hm", [thought("hm")]),
        ("<|assistant|><think>\n\n</think>\n\n", "yes", [said("yes")]),
        ("say <think>\n<|assistant|>", "yes", [said("yes")]),
        ("", "<think>\n\n</think>\n\nyes", [said("yes")]),
        ("", "yes </thi", [said("yes </thi")]),
    ],
    ids=["begun", "never ended", "left out", "only said", "empty", "half a mark"],
)
def test_a_thought_may_have_begun_in_the_prompt(prompt: str, text: str, wanted: list[AnswerPart]) -> None:
    assert read("think", text, prompt) == wanted == read("think", [text], prompt)


@pytest.mark.parametrize(
    ("inside", "wanted"),
    [
        ("{bad}", [said("{bad}")]),
        ("[1]", [said("[1]")]),
        ('{"name": "", "arguments": {}}', [said('{"name": "", "arguments": {}}')]),
        ('{"name": 3}', [said('{"name": 3}')]),
        ('{"name": "look", "arguments": [1]}', [said('{"name": "look", "arguments": [1]}')]),
        ("[" * 100_000, [said("[" * 100_000)]),
        ('{"name": "look"}', [("look", {})]),
        ('{"name": "look", "arguments": "{\\"far\\": 1}"}', [("look", {"far": 1})]),
        ('{"name": "look", "parameters": {"far": 1}}', [("look", {"far": 1})]),
        ('{"name": "other", "arguments": {"é": null}}', [("other", {"é": None})]),
    ],
    ids=[
        *("no JSON", "a list", "no name", "a number for a name", "arguments in a list", "too deep"),
        *("no arguments", "arguments as text", "parameters", "another tool"),
    ],
)
def test_what_is_no_call_is_told_as_text_and_the_answer_goes_on(inside: str, wanted: list[Any]) -> None:
    parts = told(read("hermes", [f"<tool_call>{inside}</tool_call>", "\nso"]))
    if isinstance(wanted[0], AnswerPart):
        wanted = [said(wanted[0].text + "so")]
    else:
        wanted = [*wanted, said("so")]
    assert parts == wanted


def test_without_tools_nothing_is_a_call() -> None:
    assert read("hermes", [f"<think>hm</think>{HERMES}"], tools=()) == [thought("hm"), said(HERMES)]


def test_a_call_that_is_not_ended_counts_if_it_is_whole() -> None:
    assert told(read("hermes", HERMES.removesuffix("</tool_call>"))) == [CALL]
    cut = HERMES[: len(HERMES) // 2]
    assert read("hermes", cut) == [said(cut.removeprefix("<tool_call>"))]


def test_pieces_are_told_as_soon_as_they_can_be_no_mark() -> None:
    reader = AnswerReader(form("hermes"), "", TOOLS)
    assert reader.feed("Yes, ") == (said("Yes,"),), "white space may stand before a call"
    assert reader.feed("it <tool") == (said(" it"),)
    assert reader.feed("s>") == (said(" <tools>"),)
    assert reader.feed("", last=True) == ()


def test_ids_are_the_models_own_or_new_ones() -> None:
    kimi = next(written.text for written in WRITTEN if written.form == "kimi-k2")
    assert [part.call.id for part in read("kimi-k2", [kimi]) if part.call] == ["functions.look:0", "look:1"]
    ids = [part.call.id for part in read("hermes", [HERMES * 50]) if part.call]
    assert len(set(ids)) == 50 and all(len(each) == 9 and each.isalnum() for each in ids)


DECLARED = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>", "content": "text"},
        "tool_calls": {
            "open": "<c>",
            "close": "</c>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def test_what_a_checkpoint_declares_counts_if_it_is_asked_for() -> None:
    assert answer_form("auto", "", DECLARED) is None and answer_form("none", "<tool_call>", None) is None
    declared = answer_form("checkpoint", "<tool_call>", DECLARED)
    assert declared is not None
    reader = AnswerReader(declared, "<t>a<|assistant|><t>", TOOLS)
    parts = [*reader.feed('hm</t>yes<c>{"name": "look"}</c>'), *reader.feed("", last=True)]
    assert told(joined(parts)) == [thought("hm"), said("yes"), ("look", {})]


@pytest.mark.parametrize("declared", [None, {}, {"fields": {"content": {"content": "text"}}}, {"fields": 3}])
def test_a_declaration_that_cannot_be_read_is_refused(declared: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match="answer_form is checkpoint"):
        answer_form("checkpoint", "", declared)
