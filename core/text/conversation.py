"""A conversation as a chat template reads it: turns, tools and further names, all of them plain JSON values."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from core.errors import InvalidRequest
from core.types.chat import ChatMessage, ToolCall

SET_HERE: Final = frozenset(
    (
        *("messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "return_assistant_tokens_mask"),
    )
)
"""Names that the server gives to a template, or to what renders it."""
DEEPEST: Final = 64
"""Objects and lists in one another; schemas of tools have a dozen."""
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is given."""

    turns: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        messages: Sequence[ChatMessage],
        tools: Sequence[str] = (),
        arguments: str = "",
        taken: Collection[str] = (),
    ) -> Conversation:
        """As the fields of a `GenerateRequest` have it. `taken`: names that are set already, such as `bos_token`.

        Raises InvalidRequest, which names the field, for what is no JSON object and for names of the server's own.
        """
        turns = [_turn(message, f"chat.messages[{place}]") for place, message in enumerate(messages)]
        read = [_object(tool, f"chat.tools[{place}]") for place, tool in enumerate(tools)]
        given = _object(arguments, "chat.template_arguments") if arguments else {}
        for name in given:
            if not NAME.fullmatch(name):
                raise InvalidRequest.of("chat.template_arguments", "has a name that is none in a template")
            if name in SET_HERE or name in taken:
                raise InvalidRequest.of("chat.template_arguments", f"{name} is set by the server")
        return cls(turns, read, given)

    def texts(self) -> Iterator[str]:
        """Every text in it, names of fields included."""
        return _texts([self.turns, self.tools, self.arguments])


def _turn(message: ChatMessage, field: str) -> dict[str, Any]:
    """The turn by the names that templates know."""
    calls = [_call(call, f"{field}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls)]
    more: dict[str, Any] = {
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning,
    }
    given = {name: value for name, value in more.items() if value}
    content: Any = list(map(_part, _joined(message.parts))) if message.parts else message.content
    return {"role": message.role, "content": content, **given}


def _joined(parts: Sequence[str | bytes]) -> Iterator[str | bytes]:
    """`parts` with adjacent texts as one: a special token that is spread over two would be found in none of them."""
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if is_text:
            yield "".join(part for part in run if isinstance(part, str))
        else:
            yield from run


def _part(part: str | bytes) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def _call(call: ToolCall, field: str) -> dict[str, Any]:
    arguments = _object(call.arguments, f"{field}.arguments") if call.arguments else {}
    named = {"id": call.id} if call.id else {}
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}, **named}


def _texts(value: Any) -> Iterator[str]:
    # Not by recursion: JSON may be nested as deep as it is read.
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            left += each


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except RecursionError:
        raise InvalidRequest.of(field, f"is nested more than {DEEPEST} deep") from None
    except ValueError as error:
        said = "is not valid JSON" if isinstance(error, json.JSONDecodeError) else "has a number of too many digits"
        raise InvalidRequest.of(field, said) from None
    if not isinstance(found, dict):
        raise InvalidRequest.of(field, "must be a JSON object")
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in level if isinstance(each, dict | list)]
    if level:
        raise InvalidRequest.of(field, f"is nested more than {DEEPEST} deep")
    return found
