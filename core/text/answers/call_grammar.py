"""Makes an answer call tools: the constraint that lets it think first, and then only call what was offered."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from core.errors import FieldViolation, InvalidRequest
from core.types.constraint import Constraint, ConstraintKind

NO_ARGUMENTS: Final = {"additionalProperties": False}
"""The schema of a tool without parameters, as OpenAI has it."""

TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class CallWriting:
    """What stands around the arguments of a call, {name} for that of the tool, and before, between and behind calls.

    `most`: calls that an answer can have; None for any number. `thought`: what stands around a thought.
    """

    begin: str
    end: str
    before: str = ""
    between: str = ""
    behind: str = ""
    most: int | None = None
    thought: tuple[str, str] | None = ("<think>", "</think>")


_NAMED: Final = '{"name": "{name}", "arguments": '

WRITINGS: Final = {
    "hermes": CallWriting("<tool_call>\n" + _NAMED, "}\n</tool_call>", between="\n"),
    "llama3": CallWriting('{"name": "{name}", "parameters": ', "}", between="; ", thought=None),
    "mistral-args": CallWriting("[TOOL_CALLS]{name}[ARGS]", "", thought=("[THINK]", "[/THINK]")),
    "mistral": CallWriting(_NAMED, "}", "[TOOL_CALLS] [", ", ", "]", thought=("[THINK]", "[/THINK]")),
    "nemotron": CallWriting(_NAMED, "}", "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "granite": CallWriting(_NAMED, "}", "<|tool_call|>[", ", ", "]"),
    "command": CallWriting(
        '{"tool_call_id": "0", "tool_name": "{name}", "parameters": ',
        "}",
        "<|START_ACTION|>[",
        ", ",
        "]<|END_ACTION|>",
        thought=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "deepseek": CallWriting(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi-k2": CallWriting(
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
        most=1,  # the next one would have to count
    ),
    "gpt-oss": CallWriting(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "",
        most=1,
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
}
"""By the names of forms. Those whose arguments are elements, not JSON, are not here."""


def forced_calls(form: str, tools: Sequence[Mapping[str, Any]], name: str, prompt: str) -> Constraint:
    """The constraint of an answer that calls at least one of `tools`, or once the one called `name`.

    `prompt`: the text of the prompt's end, where a thought may have begun.

    Raises InvalidRequest, which names the fields that cannot be enforced.
    """
    writing = WRITINGS.get(form)
    if writing is None:
        raise InvalidRequest.of("chat.tool_choice", f"calls cannot be required where they are written as {form!r}")
    begun = writing.thought is not None and re.search(re.escape(writing.thought[0]) + r"\s*$", prompt)
    told = {
        "thought": writing.thought,
        "begun": bool(begun),
        "before": writing.before,
        "calls": [[writing.begin.replace("{name}", said), schema] for said, schema in _functions(tools, name)],
        "end": writing.end,
        "between": writing.between,
        "behind": writing.behind,
        "most": 1 if name else writing.most,
    }
    # Not sorted: arguments come in the order of their schema, which their author may have chosen.
    constraint = Constraint(ConstraintKind.CALLS, json.dumps(told))
    violations = constraint.violations()
    if violations:
        raise InvalidRequest(violations)
    return constraint


def _functions(tools: Sequence[Mapping[str, Any]], name: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and schema of each tool that may be called: of all, or of those called `name`.

    Raises InvalidRequest naming tools that say no name or no schema, and a name that is none of theirs.
    """
    violations, found = [], []
    for place, tool in enumerate(tools):
        function = tool.get("function", tool)
        said, schema = _said_of(function)
        if name and said != name:
            continue
        field = f"chat.tools[{place}]"
        if said is None or not TOOL_NAME.fullmatch(said):
            reason = "needs a function.name of 1 to 64 characters of A-Z a-z 0-9 _ . - where calls are required"
            violations.append(FieldViolation(field, reason))
        elif not _is_of_objects(schema):
            violations.append(FieldViolation(field, "has function.parameters that are no schema of an object"))
        else:
            found.append((said, {**schema, "type": "object"}))
    if not (found or violations):
        violations.append(FieldViolation("chat.tool_choice.name", "no tool has this name"))
    if violations:
        raise InvalidRequest(violations)
    return found


def _said_of(function: Any) -> tuple[str | None, Any]:
    """The name, if there is one, and the schema of what a tool says of its function."""
    if not isinstance(function, dict):
        return None, None
    name, schema = function.get("name"), function.get("parameters")
    return name if isinstance(name, str) else None, NO_ARGUMENTS if schema is None else schema


def _is_of_objects(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    types = schema.get("type", "object")
    return "object" in (types if isinstance(types, list) else [types])
