"""The same answers as each family of models writes them: a thought, a text, two calls."""

from __future__ import annotations

from dataclasses import dataclass

from core.types.chat import AnswerKind, AnswerPart

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"properties": {"who": {"type": "string"}, "far": {"type": "integer"}}},
        },
    }
]
ARGUMENTS = '{"who": "Ann \\"A\\"", "far": 3}'
ELEMENTS = ("who", 'Ann "A"'), ("far", "3")


@dataclass(frozen=True)
class Written:
    """An answer in one form, and what its template writes where it gives calls back to the model."""

    form: str
    text: str
    template: str
    thinks: bool = True


def _tags(opened: str, closed: str) -> str:
    return "".join(opened.format(key) + value + closed for key, value in ELEMENTS)


CODER = "<function=look>\n" + _tags("<parameter={}>\n", "\n</parameter>\n") + "</function>"
HERMES = '<tool_call>\n{"name": "look", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
LISTED = '{"name": "look", "arguments": ' + ARGUMENTS + "}"
THOUGHT = "<think>\nhm\n</think>\n\n"

WRITTEN = [
    Written(
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
        f"<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        f"<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{ARGUMENTS}",
        "<|start|>assistant<|channel|>final<|message|>",
    ),
    Written(
        "gemma4",
        "<|channel>thought\nhm<channel|>Yes." + '<|tool_call>call:look{who:<|"|>Ann "A"<|"|>,far:3}<tool_call|>' * 2,
        "<|tool_call>call:{{ name }}",
    ),
    Written(
        "deepseek",
        f"{THOUGHT}Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
    ),
    Written(
        "deepseek-dsml",
        f"{THOUGHT}Yes.\n\n<｜DSML｜function_calls>"
        + (
            '\n<｜DSML｜invoke name="look">\n'
            + _tags('<｜DSML｜parameter name="{}" string="true">', "</｜DSML｜parameter>\n")
            + "</｜DSML｜invoke>"
        )
        * 2
        + "\n</｜DSML｜function_calls>",
        "<｜DSML｜function_calls>",
    ),
    Written(
        "kimi-k2",
        f"{THOUGHT}Yes.<|tool_calls_section_begin|>"
        f"<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
        f"<|tool_call_begin|>look:1<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    ),
    Written(
        "mistral-args",
        f"[THINK]hm[/THINK]Yes.[TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]look[CALL_ID]abc[ARGS]{ARGUMENTS}",
        "[TOOL_CALLS]{{ name }}[ARGS]",
    ),
    Written("mistral", f"[THINK]hm[/THINK]Yes.[TOOL_CALLS] [{LISTED}, {LISTED}]", "[TOOL_CALLS]"),
    Written(
        "glm4",
        f"\n{THOUGHT}Yes."
        + ("\n<tool_call>look\n" + _tags("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n") + "</tool_call>") * 2,
        "<tool_call>{{ name }}<arg_key>{{ key }}</arg_key><arg_value>",
    ),
    Written(
        "minimax",
        f"{THOUGHT}Yes.\n<minimax:tool_call>"
        + ('\n<invoke name="look">\n' + _tags('<parameter name="{}">', "</parameter>\n") + "</invoke>") * 2
        + "\n</minimax:tool_call>",
        '<minimax:tool_call><invoke name="{{ name }}">',
    ),
    Written(
        "seed-oss",
        f"<seed:think>\nhm</seed:think>Yes.\n<seed:tool_call>\n{CODER}\n</seed:tool_call>"
        f"<seed:tool_call>{CODER}</seed:tool_call>",
        "<seed:tool_call><function={{ name }}><parameter={{ key }}>",
    ),
    Written("nemotron", f"{THOUGHT}Yes.\n<TOOLCALL>[{LISTED}, {LISTED}]</TOOLCALL>", "<TOOLCALL>"),
    Written(
        "command",
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|><|START_ACTION|>["
        + ", ".join([f'{{"tool_call_id": "0", "tool_name": "look", "parameters": {ARGUMENTS}}}'] * 2)
        + "]<|END_ACTION|>",
        "<|START_ACTION|><|START_RESPONSE|>",
    ),
    Written("granite", f"{THOUGHT}Yes.<|tool_call|>[{LISTED}, {LISTED}]", "<|tool_call|>"),
    Written(
        "qwen3-coder",
        f"{THOUGHT}Yes.\n<tool_call>\n{CODER}\n</tool_call>\n<tool_call>\n{CODER}\n</tool_call>",
        "<tool_call><function={{ name }}><parameter={{ key }}>",
    ),
    Written("hermes", f"{THOUGHT}Yes.\n{HERMES}\n{HERMES}", "<think><tool_call>"),
]


def joined(parts: list[AnswerPart]) -> list[AnswerPart]:
    """The parts with pieces of one kind that follow each other put together, and without ids of calls."""
    found: list[AnswerPart] = []
    for part in parts:
        if part.call is None and found and found[-1].kind is part.kind:
            found[-1] = AnswerPart(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return found


def said(text: str) -> AnswerPart:
    """A piece of content."""
    return AnswerPart(AnswerKind.CONTENT, text)


def thought(text: str) -> AnswerPart:
    """A piece of reasoning."""
    return AnswerPart(AnswerKind.REASONING, text)
