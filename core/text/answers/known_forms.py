"""The forms in which families of models write thoughts and calls, as data for the parser of `transformers`.

Each form names marks: texts that are in the chat template of every checkpoint which writes in it, since a template
shows the model its own earlier calls. Formats are those of the models' own templates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

CALLS: Final = "tool_calls"
REASONING: Final = "reasoning_content"
CONTENT: Final = "content"
MARKS: Final = "marks"


@dataclass(frozen=True, slots=True)
class KnownForm:
    """A form by its name. `marks`: texts of which all are in the template. `fields`: of a response template."""

    name: str
    marks: tuple[str, ...]
    fields: dict[str, dict[str, Any]]


def _between(opened: str, closed: str) -> dict[str, Any]:
    """A text between two literals, without the white space at its end."""
    return {"open": opened, "close_pattern": r"\s*" + re.escape(closed), "content": "text"}


def _list(
    opened: str, closed: str | None = None, name: str = "{name}", arguments: str = "{arguments}"
) -> dict[str, Any]:
    """Calls in one JSON list behind the pattern `opened`, up to `closed` or the end."""
    function = {"name": name, "arguments": arguments}
    return {
        "open_pattern": r"\s*" + opened + r"\s*",
        **({} if closed is None else {"close": closed}),
        "repeats": True,
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": function},
    }


def _tagged(opened: str, closed: str, parameter: str) -> dict[str, Any]:
    """Calls whose arguments are an element each: `parameter` captures `key` and `value`."""
    return _calls(opened, closed, "xml-inline", tag_pattern=parameter)


def _marks(pattern: str) -> dict[str, dict[str, Any]]:
    """Marks around parts, which are no text. An optional end of a part's own pattern would be missed in a stream."""
    return {MARKS: {"open_pattern": pattern, "close_pattern": "", "repeats": True, "content": "text"}}


def _calls(opened: str, closed: str, content: str = "json", **arguments: Any) -> dict[str, Any]:
    """Calls between two patterns, of which the first or the second captures `name`, or the content has it."""
    named = "(?P<name>" in opened
    function: Any = {"name": "{name}", "arguments": "{content}"} if named else "{content}"
    more = {"content_args": arguments} if arguments else {}
    transform = {"type": "function", "function": function, **({"id": "{id}"} if "(?P<id>" in opened else {})}
    # White space between calls, and between a text and a call, is no text.
    opened = r"\s*" + opened
    return {"open_pattern": opened, "close_pattern": closed, "repeats": True, "content": content, **more} | {
        "transform": transform
    }


_THOUGHT: Final = {REASONING: _between("<think>", "</think>")}
_REST: Final = {CONTENT: {"content": "text"}}
_BRACKETED: Final = {REASONING: _between("[THINK]", "[/THINK]")}
_CHANNEL: Final = r"<\|channel\|>"
_FUNCTION: Final = r"<function=(?P<name>[^>\n]+)>"
_PARAMETER: Final = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
_NAME: Final = r"(?P<name>[^\s<>\[\]{}\"]+)"

KNOWN_FORMS: Final = (
    KnownForm(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        {
            REASONING: {
                "open_pattern": _CHANNEL + r"(?:analysis|commentary)<\|message\|>",
                "close": "<|end|>",
                "repeats": True,
                "join": "\n",
                "content": "text",
            },
            CALLS: _calls(
                rf"(?:<\|start\|>assistant)?(?: to=functions\.{_NAME}{_CHANNEL}\w+|{_CHANNEL}\w+ to=functions\.{_NAME})"
                r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
                r"<\|call\|>",
            ),
            **_marks(
                rf"(?:<\|start\|>assistant)?{_CHANNEL}final(?: <\|constrain\|>\w+)?<\|message\|>"
                r"|<\|start\|>assistant|<\|(?:return|end|call)\|>"
            ),
            **_REST,
        },
    ),
    KnownForm(
        "gemma4",
        ("<|tool_call>call:",),
        {
            REASONING: _between("<|channel>thought\n", "<channel|>"),
            CALLS: _calls(
                r"<\|tool_call>call:(?P<name>[\w.-]+)",
                r"<tool_call\|>",
                unquoted_keys=True,
                string_delims=[['<|"|>', '<|"|>']],
            ),
            **_REST,
        },
    ),
    KnownForm(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        {
            **_THOUGHT,
            CALLS: _calls(
                r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
                r"(?P<name>(?!function<)[^\s<>｜{}]+)(?:\s*```json\s*|<｜tool▁sep｜>)",
                r"(?:\s*```)?\s*<｜tool▁call▁end｜>",
            ),
            **_marks(r"\s*<｜tool▁calls▁(?:begin|end)｜>"),
            **_REST,
        },
    ),
    KnownForm(
        "kimi-k2",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        {
            **_THOUGHT,
            CALLS: _calls(
                r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>:{}]+)(?::\d+)?)\s*"
                r"<\|tool_call_argument_begin\|>",
                r"<\|tool_call_end\|>",
            ),
            **_marks(r"\s*<\|tool_calls_section_(?:begin|end)\|>"),
            **_REST,
        },
    ),
    KnownForm(
        "mistral-args",
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            **_BRACKETED,
            CALLS: _calls(
                rf"\[TOOL_CALLS\]{_NAME}(?:\[CALL_ID\][^\s\[]+)?\[ARGS\]",
                r"(?=\[TOOL_CALLS\])",
            ),
            **_REST,
        },
    ),
    KnownForm("mistral", ("[TOOL_CALLS]",), {**_BRACKETED, CALLS: _list(r"\[TOOL_CALLS\]"), **_REST}),
    KnownForm(
        "glm4",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        {
            **_THOUGHT,
            CALLS: _tagged(
                r"<tool_call>\s*(?P<name>[^\s<>]+)",
                r"</tool_call>",
                r"<arg_key>\s*(?P<key>[^<]*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            ),
            **_REST,
        },
    ),
    KnownForm(
        "deepseek-dsml",
        ("｜DSML｜",),
        {
            **_THOUGHT,
            CALLS: _tagged(
                r"<｜DSML｜invoke name=\"(?P<name>[^\"]+)\">",
                r"</｜DSML｜invoke>",
                r"<｜DSML｜parameter name=\"(?P<key>[^\"]+)\"[^>]*>(?P<value>.*?)</｜DSML｜parameter>",
            ),
            **_marks(r"\s*</?｜DSML｜(?:function|tool)_calls>"),
            **_REST,
        },
    ),
    KnownForm(
        "minimax",
        ("<minimax:tool_call>", "<invoke name="),
        {
            **_THOUGHT,
            CALLS: _tagged(
                r"<invoke name=\"(?P<name>[^\"]+)\">",
                r"</invoke>",
                r"<parameter name=\"(?P<key>[^\"]+)\">(?P<value>.*?)</parameter>",
            ),
            **_marks(r"\s*</?minimax:tool_call>"),
            **_REST,
        },
    ),
    KnownForm(
        "seed-oss",
        ("<seed:tool_call>",),
        {
            REASONING: _between("<seed:think>", "</seed:think>"),
            CALLS: _tagged(_FUNCTION, r"</function>", _PARAMETER),
            **_marks(r"\s*</?seed:tool_call>"),
            **_REST,
        },
    ),
    KnownForm(
        "nemotron",
        ("<TOOLCALL>",),
        {**_THOUGHT, CALLS: _list("<TOOLCALL>", "</TOOLCALL>"), **_REST},
    ),
    KnownForm(
        "command",
        ("<|START_ACTION|>", "<|START_RESPONSE|>"),
        {
            REASONING: _between("<|START_THINKING|>", "<|END_THINKING|>"),
            CALLS: _list(r"<\|START_ACTION\|>", "<|END_ACTION|>", "{tool_name}", "{parameters}"),
            **_marks(r"\s*<\|(?:START|END)_RESPONSE\|>"),
            **_REST,
        },
    ),
    KnownForm("granite", ("<|tool_call|>",), {**_THOUGHT, CALLS: _list(r"<\|tool_call\|>", "<|/tool_call|>"), **_REST}),
    KnownForm(
        "qwen3-coder",
        ("<function=", "<parameter="),
        {
            **_THOUGHT,
            CALLS: _tagged(_FUNCTION, r"</function>", _PARAMETER),
            **_marks(r"\s*</?tool_call>"),
            **_REST,
        },
    ),
    KnownForm("hermes", ("<tool_call>",), {**_THOUGHT, CALLS: _calls("<tool_call>", "</tool_call>"), **_REST}),
    KnownForm(
        "llama3",
        ("<|start_header_id|>", '"parameters": '),
        {
            CALLS: _calls(
                r"(?:\A\s*(?:<\|python_tag\|>)?|;)\s*\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?"
                r"\"name\"\s*:\s*\"(?P<name>[^\"]+)\"\s*,\s*\"parameters\"\s*:\s*",
                r"\}\s*(?:(?=;\s*\{)|\Z)",
            ),
            **_REST,
        },
    ),
    KnownForm("think", ("</think>",), {**_THOUGHT, **_REST}),
)
"""The first whose marks are all there counts."""
