"""Reads one answer as it comes: pieces of text to what is said, what is thought, and whole calls.

The parser is that of `transformers` (`utils.chat_parsing`). Beyond it: what is no call after all is told as text, and
what the prompt began is not told again.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from core.text.answers.answer_form import AnswerForm
from core.text.answers.known_forms import CALLS
from core.types.chat import AnswerKind, AnswerPart, ToolCall

PROMPT_TOKENS: Final = 128
"""The last tokens of a prompt, which show whether its template has begun a thought."""
_ID_CHARS: Final = 9
"""Templates of Mistral refuse ids of any other length."""
_THOUGHTS: Final = frozenset({"reasoning_content", "reasoning", "thinking"})
_FAILED: Final = "region_failed"


class AnswerReader:
    """The parts of one answer. `feed` its text in order, the last piece with `last`."""

    def __init__(self, form: AnswerForm, prompt: str, tools: Sequence[dict[str, Any]]) -> None:
        """`prompt`: the text of its last PROMPT_TOKENS tokens. `tools`: what may be called; none: nothing is a call."""
        template = form.whole if tools else form.spoken
        begun = prompt if template.start_anchor_re.search(prompt) else ""
        self._parser = _Parser(template, begun, tools)
        self._at_start = True
        """Whether line breaks are still to be left out: those that a form puts around its parts."""

    def feed(self, text: str, *, last: bool = False) -> tuple[AnswerPart, ...]:
        """The parts that are complete with `text`. Pieces that may be the beginning of a mark are held back."""
        events = self._parser.feed(text) if text else []
        if last:
            events += self._parser.rest()
        return tuple(self._parts(events))

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> Iterator[AnswerPart]:
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == _FAILED:
                yield AnswerPart(AnswerKind.CONTENT, event["text"])
            elif kind == "region_close":
                if field == CALLS:
                    yield from map(_call, event["value"] if isinstance(event["value"], list) else [event["value"]])
                self._at_start = True
            elif kind == "region_chunk" and field != CALLS and (text := self._without_breaks(event["text"])):
                yield AnswerPart(AnswerKind.REASONING if field in _THOUGHTS else AnswerKind.CONTENT, text)

    def _without_breaks(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text


class _Parser(ResponseParser):
    """The parser, where a region that cannot be read does not end the answer: its text is told by an event."""

    def __init__(self, template: ResponseTemplate, prompt: str, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(template, prefix=prompt, tools=list(tools))

    def rest(self) -> list[dict[str, Any]]:
        """The last events. Unlike `finalize` it makes no message, so nothing can be missing in it."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, body = self._current, self._body
        try:
            super()._close_current(events)
            if field == CALLS and events and events[-1]["type"] == "region_close":
                _refuse_no_calls(events[-1]["value"])
        except (ValueError, TypeError, KeyError, RecursionError):
            if events and events[-1]["type"] == "region_close":
                events.pop()
            events.append({"type": _FAILED, "field": field, "text": body})
            self._reset_to_implicit()


def _refuse_no_calls(value: Any) -> None:
    """Raises ValueError, TypeError or KeyError unless `value` is a call or a list of calls."""
    for each in value if isinstance(value, list) else [value]:
        function = each["function"]
        if not (isinstance(function["name"], str) and function["name"]):
            raise ValueError("a call names a tool")
        arguments = _arguments(function)
        if not isinstance(arguments, dict):
            raise ValueError("arguments of a call are an object")


def _arguments(function: Mapping[str, Any]) -> Any:
    """By the names that models give them; some write the object as a text, some leave it out."""
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None or arguments == "":
        return {}
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _call(value: Mapping[str, Any]) -> AnswerPart:
    function = value["function"]
    given = value.get("id", function.get("id"))
    name = given if isinstance(given, str) and given else _new_id()
    arguments = json.dumps(_arguments(function), ensure_ascii=False)
    return AnswerPart(AnswerKind.CALL, call=ToolCall(function["name"], arguments, name))


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_CHARS))
