"""Answers of chats on the terminal: the options that ask for tools and parts, and how the parts are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any, Protocol, TypeVar

import click

from core.types.chat import AnswerKind, ToolMode

F = TypeVar("F", bound=Callable[..., None])


class SaidCall(Protocol):
    """A call, as the client and the engine both have it. `arguments`: the text of a JSON object."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> str: ...


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """What a chat asks of its answer. `tools`: texts of JSON objects. `choice`: a mode, a tool's name, or empty."""

    tools: tuple[str, ...]
    choice: str
    parsed: bool

    @classmethod
    def taken_from(cls, options: dict[str, Any], chat: bool) -> AskedAnswer:
        """Takes its options out of `options`. Raises click.UsageError for those that need --chat, and for no JSON."""
        file: IO[str] | None = options.pop("tools")
        choice, parsed = options.pop("tool_choice") or "", options.pop("parse_answer")
        if (file or choice or parsed) and not chat:
            raise click.UsageError("--tools, --tool-choice and --parse-answer go with --chat")
        if choice not in ("", "auto", "none") and file is None:
            raise click.UsageError(f"--tool-choice {choice} goes with --tools")
        return cls(() if file is None else _tools(file), choice, parsed)

    @property
    def mode(self) -> ToolMode:
        """The mode of the choice, which requires a call if it names a tool."""
        modes = {mode.value: mode for mode in ToolMode}
        return modes.get(self.choice, ToolMode.REQUIRED) if self.choice else ToolMode.AUTO

    @property
    def name(self) -> str:
        """The name of the chosen tool; empty if none is."""
        return "" if self.choice in {mode.value for mode in ToolMode} else self.choice


def answer_options(command: F) -> F:
    """The options of `AskedAnswer`."""
    for option in (
        click.option(
            "--parse-answer",
            is_flag=True,
            help="With --chat: show thoughts and calls of tools apart from what is said.",
        ),
        click.option(
            "--tool-choice",
            metavar="CHOICE",
            help="With --tools: auto, none, required, or the name of the tool to call.",
        ),
        click.option(
            "--tools",
            type=click.File(encoding="utf-8"),
            help="With --chat: a JSON list of tools that the model may call, as OpenAI's clients have them.",
        ),
    ):
        command = option(command)
    return command


class ShownParts:
    """The text that shows the parts of one answer: each kind on lines of its own, thoughts dim, calls bold."""

    def __init__(self) -> None:
        self._last: str | None = None

    def text(self, parts: Iterable[tuple[str, str, SaidCall | None]]) -> str:
        """What comes next on the terminal, for (kind, text, call) each."""
        return "".join(self._begun(kind, call) + _styled(kind, text, call) for kind, text, call in parts)

    def _begun(self, kind: str, call: SaidCall | None) -> str:
        last, self._last = self._last, kind
        return "\n" if last is not None and (kind != last or call is not None) else ""


def _styled(kind: str, text: str, call: SaidCall | None) -> str:
    if call is not None:
        return click.style(f"{call.name}({call.arguments})", bold=True)
    return click.style(text, dim=True) if kind == AnswerKind.REASONING.value else text


def _tools(file: IO[str]) -> tuple[str, ...]:
    try:
        listed = json.load(file)
    except ValueError as error:
        raise click.UsageError(f"--tools {file.name} is no JSON: {error}") from None
    if not isinstance(listed, list):
        raise click.UsageError(f"--tools {file.name} has no list, but {type(listed).__name__}")
    return tuple(json.dumps(each, ensure_ascii=False) for each in listed)
