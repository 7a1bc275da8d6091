"""Reads the conversation of a GenerateRequest, field by field; what a template makes of it is the engine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from core.errors import FieldViolation
from core.types.io import ChatMessage, ModelInfo
from service.pb.slipstream.v1 import inference_pb2 as pb

MAX_ROLE_CHARS: Final = 64
MAX_TOOLS: Final = 128


def chat_violations(chat: pb.Chat, info: ModelInfo) -> Iterator[FieldViolation]:
    """The violations of a conversation that no template would change."""
    if not info.has_chat_template:
        yield FieldViolation("chat", "the served model has no chat template; use text or token_ids")
    if not chat.messages:
        yield FieldViolation("chat.messages", "must not be empty")
    if len(chat.tools) > MAX_TOOLS:
        yield FieldViolation("chat.tools", f"has {len(chat.tools)} tools, at most {MAX_TOOLS} can be served")
    for i, turn in enumerate(chat.messages):
        if not 1 <= len(turn.role) <= MAX_ROLE_CHARS:
            yield FieldViolation(f"chat.messages[{i}].role", f"must have 1 to {MAX_ROLE_CHARS} characters")
        for j, call in enumerate(turn.tool_calls):
            yield from _call_violations(call, f"chat.messages[{i}].tool_calls[{j}]")


def _call_violations(call: pb.ToolCall, field: str) -> Iterator[FieldViolation]:
    if not call.name:
        yield FieldViolation(f"{field}.name", "must not be empty")
    try:
        found = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        yield FieldViolation(f"{field}.arguments", "is not valid JSON")
        return
    if not isinstance(found, dict):
        yield FieldViolation(f"{field}.arguments", "must be a JSON object")


def chat_fields(chat: pb.Chat) -> dict[str, Any]:
    """Fields of a `GenerateRequest` with the conversation, which has no violations."""
    return {
        "chat": tuple(ChatMessage(turn.role, turn.content, _more(turn)) for turn in chat.messages),
        "special_tokens": chat.special_tokens,
        "chat_tools": tuple(chat.tools),
        "chat_arguments": chat.template_arguments,
    }


def _more(turn: pb.ChatMessage) -> str:
    """Fields of the turn by the names that templates know, as JSON; empty where there are none."""
    more: dict[str, Any] = {
        "tool_call_id": turn.tool_call_id,
        "name": turn.name,
        "reasoning_content": turn.reasoning,
        "tool_calls": [_call(call) for call in turn.tool_calls],
    }
    more = {name: value for name, value in more.items() if value}
    return json.dumps(more, ensure_ascii=False) if more else ""


def _call(call: pb.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments or "{}")}
    return {"type": "function", "function": function, **({"id": call.id} if call.id else {})}
