"""Parts of requests, made of what callers of the client give."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from service.pb.slipstream.v1 import inference_pb2 as pb

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages with `role` and `content`."""


def set_input(request: pb.GenerateRequest, prompt: Prompt) -> None:
    """Give `request` its input."""
    if isinstance(prompt, str):
        request.text = prompt
        return
    if prompt and isinstance(prompt[0], Mapping):
        turns = [pb.ChatMessage(role=turn["role"], content=turn["content"]) for turn in prompt]  # type: ignore[index]
        request.chat.CopyFrom(pb.Chat(messages=turns))
        return
    request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]


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
