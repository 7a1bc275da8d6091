"""What a chat's answer is made of, as callers of the client see it, and the turn that it becomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from service.pb.slipstream.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. `arguments`: the text of a JSON object. `id` goes back with the result, as `tool_call_id`."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer; `kind` is "content", "reasoning" or "tool_call", and a call comes whole, in `call`."""

    kind: str
    text: str = ""
    call: Call | None = None


def answer_turn(parts: Iterable[Part]) -> dict[str, Any]:
    """The assistant's turn that all parts of an output are, as OpenAI's clients have it: for the next request."""
    told = list(parts)
    turn: dict[str, Any] = {"role": "assistant", "content": _joined(told, "content")}
    if thought := _joined(told, "reasoning"):
        turn["reasoning_content"] = thought
    calls = [part.call for part in told if part.call is not None]
    if calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return turn


def _joined(parts: Iterable[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def parts_of(entries: Iterable[pb.AnswerPart]) -> tuple[Part, ...]:
    """The parts in a delta. A kind that this client does not know is left out."""
    return tuple(part for entry in entries if (part := _part(entry)) is not None)


def _part(entry: pb.AnswerPart) -> Part | None:
    kind = entry.WhichOneof("kind")
    if kind == "tool_call":
        call = entry.tool_call
        return Part(kind, call=Call(call.id, call.name, call.arguments))
    return None if kind is None else Part(kind, getattr(entry, kind))
