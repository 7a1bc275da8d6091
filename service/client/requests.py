"""Parts of requests, made of what callers of the client give."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.pb.slipstream.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Sound:
    """A sound that is to be written down: a WAV file, and the `language` that is spoken in it, such as "en".

    The language is left out for a model that knows one alone.
    """

    data: bytes
    language: str = ""
    translate: bool = False


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Sound
"""Text, token ids, or chat messages: `role` and `content`, a text or a list of texts and images, also `name`,
`reasoning_content`, `tool_call_id`, and `tool_calls` as OpenAI's clients have them. For models that hear: a Sound."""


DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_TOOL_MODES = {"auto": pb.TOOL_MODE_AUTO, "none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}


def set_input(request: pb.GenerateRequest, prompt: Prompt, chat: pb.Chat, images: Sequence[bytes] = ()) -> None:
    """Give `request` its input. Raises ValueError where `chat` has options and the prompt is no chat."""
    request.images.extend(pb.Image(data=each) for each in images)
    if not isinstance(prompt, str | Sound) and prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(chat)
        request.chat.messages.extend(map(_turn, prompt))  # type: ignore[arg-type]
        return
    if chat.ListFields():
        what = "tools, template_arguments, special_tokens, parse_answer and tool_choice"
        raise ValueError(f"{what} are for chats: give messages")
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Sound):
        task = pb.AUDIO_TASK_TRANSLATE if prompt.translate else pb.AUDIO_TASK_TRANSCRIBE
        request.audio.CopyFrom(pb.Audio(data=prompt.data, language=prompt.language, task=task))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]


def _turn(given: Mapping[str, Any]) -> pb.ChatMessage:
    """The message of one turn, as OpenAI's clients have it."""
    calls = [
        pb.ToolCall(
            id=call.get("id", ""), name=call["function"]["name"], arguments=_json(call["function"]["arguments"])
        )
        for call in given.get("tool_calls") or ()
    ]
    content = given.get("content") or ""
    return pb.ChatMessage(
        role=given["role"],
        content=content if isinstance(content, str) else "",
        parts=[] if isinstance(content, str) else map(_part, content),
        tool_calls=calls,
        tool_call_id=given.get("tool_call_id", ""),
        name=given.get("name", ""),
        reasoning=given.get("reasoning_content", ""),
    )


def _part(given: Mapping[str, Any]) -> pb.ContentPart:
    """The text of {"type": "text", "text": …}, the image of {"type": "image", "data": bytes} or of an OpenAI client.

    Raises ValueError for an image that is not there as bytes: nothing is fetched from other hosts.
    """
    if given["type"] == "text":
        return pb.ContentPart(text=given["text"])
    if given["type"] == "image":
        return pb.ContentPart(image=pb.Image(data=given["data"]))
    if given["type"] != "image_url":
        raise ValueError(f"a part of type {given['type']!r} is neither a text nor an image")
    found = DATA_URL.match(given["image_url"]["url"])
    if found is None:
        raise ValueError('an image_url holds the image itself: "data:image/png;base64,…"')
    return pb.ContentPart(image=pb.Image(data=base64.b64decode(given["image_url"]["url"][found.end() :])))


def chat_options(
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    special_tokens: bool,
    parse_answer: bool,
    tool_choice: str,
) -> pb.Chat:
    """What a conversation has beside its turns. `tool_choice`: "auto", "none", "required", or the name of a tool."""
    mode = _TOOL_MODES.get(tool_choice)
    named = pb.ToolChoice(name=tool_choice) if tool_choice else None
    return pb.Chat(
        tool_choice=named if mode is None else pb.ToolChoice(mode=mode),
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
    if kind == "structural_tags":
        return pb.Constraint(structural_tags=_structural_tags(**value))
    text: Any = json.dumps(value) if isinstance(value, Mapping) else value
    return pb.Constraint(**{kind: text})


def _structural_tags(tags: Sequence[Mapping[str, Any]], triggers: Sequence[str], **flags: bool) -> pb.StructuralTags:
    """The message of tags whose schemas are texts or objects."""
    told = [
        pb.StructuralTag(begin=tag["begin"], json_schema=_json(tag.get("json_schema", "")), end=tag.get("end", ""))
        for tag in tags
    ]
    return pb.StructuralTags(tags=told, triggers=triggers, **flags)


def embed_input(given: str | Sequence[int]) -> pb.EmbedInput:
    """The message of one text, or of its token ids."""
    return pb.EmbedInput(text=given) if isinstance(given, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=given))
