"""Conversations at their edges: tools, calls, further names, and special tokens that are written out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.security.edges import Edge, generate, short

TOOL = '{"type": "function", "function": {"name": "look", "parameters": {"properties": {}}}}'
CALLS = "chat.messages[0].tool_calls"


def asked(name: str, refused: str | None = None, *, turn: dict[str, Any] | None = None, **fields: Any) -> Edge:
    """A chat of one turn with these fields."""
    message = pb.ChatMessage(**{"role": "user", "content": "a", **(turn or {})})
    return generate(name, refused, chat=pb.Chat(messages=[message], **fields), **short())


def chats() -> Iterator[Edge]:
    """Each field empty, whole, broken, and too much of it."""
    everything = {"name": "n", "reasoning": "r", "tool_call_id": "c", "tool_calls": [call()]}
    yield asked("a turn with everything", turn=everything)
    yield asked("special tokens that are meant", turn={"content": "</s>"}, special_tokens=True)
    yield asked("special tokens that are not", turn={"content": "</s>" * 20}, special_tokens=False)
    yield asked("one tool", tools=[TOOL])
    yield asked("an answer in a form that is not known", "chat.parse_answer", parse_answer=True)
    for choice in (pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED), pb.ToolChoice(name="look")):
        yield asked("a call in a form that is not known", "chat.tool_choice", tools=[TOOL], tool_choice=choice)
    yield asked("a call of no tool", "chat.tool_choice", tool_choice=pb.ToolChoice(name="look" * 100_000))
    yield asked("a mode that is none", "chat.tool_choice.mode", tools=[TOOL], tool_choice=pb.ToolChoice(mode=-1))
    yield asked("a tool and no call", tools=[TOOL], tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_NONE))
    yield asked("128 tools", tools=["{}"] * 128)
    yield asked("129 tools", "chat.tools", tools=["{}"] * 129)
    yield asked("200,000 tools", "chat.tools", tools=["{}"] * 200_000)
    yield asked("a tool that is none", "chat.tools[1]", tools=[TOOL, ""])
    yield asked("a name for the template", template_arguments='{"enable_thinking": false}')
    yield asked("no names for the template", template_arguments="{}")
    yield asked("a name of the server", "chat.template_arguments", template_arguments='{"messages": []}')
    yield asked("further names that are no object", "chat.template_arguments", template_arguments="[]")
    yield asked("a number without end", "chat.template_arguments", template_arguments='{"a": ' + "9" * 5000 + "}")
    yield asked("a call without a name", f"{CALLS}[0].name", turn={"tool_calls": [pb.ToolCall()]})
    yield asked("a call without arguments", turn={"tool_calls": [call("")]})
    for depth in (65, 900, 990, 10_000):
        nested = '{"a":' + "[" * depth + "]" * depth + "}"
        yield asked(f"arguments {depth} deep", f"{CALLS}[0].arguments", turn={"tool_calls": [call(nested)]})
    for count in (1, 16, 17, 200_000):
        yield generate(f"{count} images", "images", text="a", images=[pb.Image(data=b"a")] * count, **short())
    shown = {"content": "", "parts": [pb.ContentPart(image=pb.Image(data=b"a"))]}
    yield asked("an image", "chat.messages[0].parts[0]", turn=shown)
    yield asked("a part of nothing", "chat.messages[0].parts[0]", turn={"content": "", "parts": [pb.ContentPart()]})
    both = {"content": "a", "parts": [pb.ContentPart(text="b")]}
    yield asked("parts beside a text", "chat.messages[0].content", turn=both)
    yield asked("many parts", "chat.messages", turn={"content": "", "parts": [pb.ContentPart(text="b")] * 300_000})
    for language, task in (("", 0), ("en", 1), ("x" * 100_000, 2), ("en", -1)):
        audio = pb.Audio(data=b"RIFF" * 1_000, language=language, task=task)  # type: ignore[arg-type]
        yield generate(f"a sound in {language[:9]!r} to do {task}", "audio", audio=audio, **short())
    yield asked("many calls", "chat.messages", turn={"tool_calls": [call()] * 100_000})


def call(arguments: str = '{"far": 3}') -> pb.ToolCall:
    """A call of a tool."""
    return pb.ToolCall(id="c1", name="look", arguments=arguments)
