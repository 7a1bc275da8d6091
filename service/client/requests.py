"""Parts of requests, made of what callers of the client give."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from service.pb.slipstream.v1 import inference_pb2 as pb

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages: `role` and `content`, also `name`, `reasoning_content`, `tool_call_id`, and
`tool_calls` as OpenAI's clients have them."""


def set_input(request: pb.GenerateRequest, prompt: Prompt) -> None:
    """Give `request` its input."""
    if isinstance(prompt, str):
        request.text = prompt
        return
    if prompt and isinstance(prompt[0], Mapping):
        request.chat.messages.extend(map(_turn, prompt))  # type: ignore[arg-type]
        return
    request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]


def _turn(given: Mapping[str, Any]) -> pb.ChatMessage:
    """The message of one turn, as OpenAI's clients have it."""
    calls = [
        pb.ToolCall(
            id=call.get("id", ""), name=call["function"]["name"], arguments=_json(call["function"]["arguments"])
        )
        for call in given.get("tool_calls") or ()
    ]
    return pb.ChatMessage(
        role=given["role"],
        content=given.get("content") or "",
        tool_calls=calls,
        tool_call_id=given.get("tool_call_id", ""),
        name=given.get("name", ""),
        reasoning=given.get("reasoning_content", ""),
    )


def chat_options(
    tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], special_tokens: bool, parse_answer: bool
) -> pb.Chat:
    """What a conversation has beside its turns."""
    return pb.Chat(
        parse_answer=parse_answer,
        tools=map(json.dumps, tools),
        template_arguments=json.dumps(arguments) if arguments else "",
        special_tokens=special_tokens,
    )


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def constraint_of(given: Mapping[str, Any]) -> pb.Constraint:
    """The message of a constraint, given by its kind. Raises ValueError unless there is exactly one."""
    ((kind, value),) = given.items()
    if kind == "choice":
        return pb.Constraint(choice=pb.Choice(choices=value))
    text: Any = json.dumps(value) if isinstance(value, Mapping) else value
    return pb.Constraint(**{kind: text})


def embed_input(given: str | Sequence[int]) -> pb.EmbedInput:
    """The message of one text, or of its token ids."""
    return pb.EmbedInput(text=given) if isinstance(given, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=given))
