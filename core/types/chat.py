"""Turns of a chat, and what the next one is made of once it is read: what is said, what is thought, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

UNKNOWN_FORM: Final = (
    "it is not known how this model writes thoughts and calls; read the text, or start the server with --answer-form"
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments`: the text of a JSON object; empty for none."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation, rendered by the checkpoint's own chat template. What is empty is not there.

    `tool_calls`: made in this turn. `tool_call_id`: the call whose result it is. `name`: of the speaker, or of the
    tool. `reasoning`: thought before it was said. `parts`: texts and encoded images, in order, in place of `content`.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""
    parts: tuple[str | bytes, ...] = ()

    @property
    def chars(self) -> int:
        """How many characters were sent for it."""
        calls = sum(len(call.name) + len(call.arguments) + len(call.id) for call in self.tool_calls)
        said = [each for each in self.parts if isinstance(each, str)]
        return sum(map(len, (*said, self.role, self.content, self.tool_call_id, self.name, self.reasoning))) + calls


class ToolMode(Enum):
    """Whether an answer calls tools: as the model likes, never, or at least once."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class AnswerKind(Enum):
    """What a part of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer. `call` is set for a call, which comes whole; of the others `text` is the newest piece."""

    kind: AnswerKind
    text: str = ""
    call: ToolCall | None = None
