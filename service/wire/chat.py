"""Reads the conversation of a GenerateRequest. What is JSON in it stays text: the engine reads it, off the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from core.errors import FieldViolation
from core.types.chat import UNKNOWN_FORM, AnswerKind, AnswerPart, ChatMessage, ToolCall, ToolMode
from core.types.image import BLIND
from core.types.io import ModelInfo
from service.pb.slipstream.v1 import inference_pb2 as pb

MAX_ROLE_CHARS: Final = 64
CALLS_BY: Final = "llguidance"
"""The grammar library by which calls are required."""
_MODES: Final = {
    pb.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO,
    pb.TOOL_MODE_AUTO: ToolMode.AUTO,
    pb.TOOL_MODE_NONE: ToolMode.NONE,
    pb.TOOL_MODE_REQUIRED: ToolMode.REQUIRED,
}


def chat_violations(chat: pb.Chat, info: ModelInfo) -> Iterator[FieldViolation]:
    """The violations of a conversation that no template would change."""
    if not info.has_chat_template:
        yield FieldViolation("chat", "the served model has no chat template; use text or token_ids")
    if chat.parse_answer and not info.answer_form:
        yield FieldViolation("chat.parse_answer", UNKNOWN_FORM)
    yield from _choice_violations(chat, info)
    if not chat.messages:
        yield FieldViolation("chat.messages", "must not be empty")
    for i, turn in enumerate(chat.messages):
        if not 1 <= len(turn.role) <= MAX_ROLE_CHARS:
            yield FieldViolation(f"chat.messages[{i}].role", f"must have 1 to {MAX_ROLE_CHARS} characters")
        yield from _part_violations(turn, f"chat.messages[{i}]", info)
        for j, call in enumerate(turn.tool_calls):
            if not call.name:
                yield FieldViolation(f"chat.messages[{i}].tool_calls[{j}].name", "must not be empty")


def chat_fields(chat: pb.Chat) -> dict[str, Any]:
    """Fields of a `GenerateRequest` with the conversation."""
    return {
        "chat": tuple(map(_turn, chat.messages)),
        "special_tokens": chat.special_tokens,
        "chat_tools": tuple(chat.tools),
        "chat_arguments": chat.template_arguments,
        "parse_answer": chat.parse_answer,
        "tool_mode": _MODES[pb.TOOL_MODE_REQUIRED if chat.tool_choice.name else chat.tool_choice.mode],
        "tool_name": chat.tool_choice.name,
    }


def _choice_violations(chat: pb.Chat, info: ModelInfo) -> Iterator[FieldViolation]:
    choice = chat.tool_choice
    if choice.mode not in _MODES:
        yield FieldViolation("chat.tool_choice.mode", "is none of the modes of this server")
    if choice.name and choice.mode not in (pb.TOOL_MODE_UNSPECIFIED, pb.TOOL_MODE_REQUIRED):
        yield FieldViolation("chat.tool_choice.name", "is for the mode REQUIRED")
    if not (choice.name or choice.mode == pb.TOOL_MODE_REQUIRED):
        return
    if not chat.tools:
        yield FieldViolation("chat.tool_choice", "requires a call, but there are no tools")
    if not info.answer_form:
        yield FieldViolation("chat.tool_choice", UNKNOWN_FORM)
    elif info.grammar_backend != CALLS_BY:
        yield FieldViolation("chat.tool_choice", f"requires a call, for which the server needs {CALLS_BY}")


def _turn(turn: pb.ChatMessage) -> ChatMessage:
    calls = tuple(ToolCall(call.name, call.arguments, call.id) for call in turn.tool_calls)
    parts = tuple(part.text if part.WhichOneof("part") == "text" else part.image.data for part in turn.parts)
    return ChatMessage(turn.role, turn.content, calls, turn.tool_call_id, turn.name, turn.reasoning, parts)


def _part_violations(turn: pb.ChatMessage, field: str, info: ModelInfo) -> Iterator[FieldViolation]:
    if turn.parts and turn.content:
        yield FieldViolation(f"{field}.content", "must be empty where there are parts")
    for place, part in enumerate(turn.parts):
        kind = part.WhichOneof("part")
        if kind is None:
            yield FieldViolation(f"{field}.parts[{place}]", "must have a text or an image")
        elif kind == "image" and not info.takes_images:
            yield FieldViolation(f"{field}.parts[{place}]", BLIND)


def answer_part(part: AnswerPart) -> pb.AnswerPart:
    """The message of a piece of an answer."""
    call = part.call
    if call is not None:
        return pb.AnswerPart(tool_call=pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments))
    if part.kind is AnswerKind.REASONING:
        return pb.AnswerPart(reasoning=part.text)
    return pb.AnswerPart(content=part.text)
