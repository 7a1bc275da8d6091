"""Tools, calls and further names reach a template as transformers gives them, and what cannot be one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from core.errors import InvalidRequest
from core.text.conversation import DEEPEST, Conversation
from core.text.tokenizer import Tokenizer
from core.types.chat import ChatMessage, ToolCall
from tests.unit.core.text.checkpoints import byte_level

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.name %}({{ m.name }}){% endif %}{{ m.content }}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.id }}:{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}now{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"far": {"minimum": 1}}}}}
CALLS = [{"type": "function", "function": {"name": "look", "arguments": {"far": 3, "é": None}}, "id": "c1"}]
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "where?", "name": "ann"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": CALLS},
    {"role": "tool", "content": "there", "tool_call_id": "c1"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("tools"), TEMPLATE)


def messages() -> list[ChatMessage]:
    look = ToolCall("look", json.dumps(CALLS[0]["function"]["arguments"]), "c1")  # type: ignore[index]
    return [
        ChatMessage("user", "where?", name="ann"),
        ChatMessage("assistant", "", (look,), reasoning="hm"),
        ChatMessage("tool", "there", tool_call_id="c1"),
    ]


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"enable_thinking": True, "unread": [1]}])
def test_a_template_gets_what_transformers_gives_it(directory: Path, arguments: dict[str, Any]) -> None:
    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    found = ours.render_chat(messages(), [json.dumps(TOOL)], json.dumps(arguments) if arguments else "")
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **arguments}
    assert found == theirs.apply_chat_template(TURNS, tools=[TOOL], **options)
    assert '"minimum": 1}' in found and found.endswith("now") == (arguments == {"enable_thinking": False})
    without = ours.render_chat(messages())
    assert without == theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)


def test_every_character_of_a_turn_counts() -> None:
    """Of what a client sends, so that it is bounded before anything is made of it."""
    call = ToolCall("n" * 1, "a" * 20, "i" * 300)
    turn = ChatMessage("r" * 4_000, "c" * 50_000, (call, call), "t" * 600_000, "s" * 7_000_000, "h" * 80_000_000)
    assert turn.chars == 87_654_000 + 2 * 321


def test_texts_side_by_side_are_one_text() -> None:
    """What is spread over two of them could be a special token that is found in neither."""
    found = Conversation.of([ChatMessage("user", "", parts=("<|im_", "end|>", b"png", "a", b"png", b"png", "b", "c"))])
    image = {"type": "image"}
    texts = [{"type": "text", "text": text} for text in ("<|im_end|>", "a", "bc")]
    assert found.turns[0]["content"] == [texts[0], image, texts[1], image, image, texts[2]]


def test_nothing_in_a_tool_ends_a_turn(directory: Path) -> None:
    ours = Tokenizer.load(directory)
    tool = {"type": "function", "function": {"name": "</s>", "description": "<s>"}}
    rendered, mark = ours.render_literally([ChatMessage("user", "a")], [json.dumps(tool)], "")
    ids = ours.encode_rendered(rendered, mark)
    assert [each for each in ids if each in ours.special_ids] == [ours.bos_token_id]
    assert "</s>" in ours.decode(ids, False)


DEEP = '{"a": ' + "[" * DEEPEST + "]" * DEEPEST + "}"


@pytest.mark.parametrize(
    ("tools", "arguments", "field", "said"),
    [
        (["{"], "", "chat.tools[0]", "not valid JSON"),
        (["{}", "[]"], "", "chat.tools[1]", "must be a JSON object"),
        (["[" * 100_000], "", "chat.tools[0]", "nested more than"),
        ([DEEP], "", "chat.tools[0]", "nested more than"),
        ([], "3", "chat.template_arguments", "must be a JSON object"),
        ([], '{"a b": 1}', "chat.template_arguments", "none in a template"),
        ([], '{"messages": []}', "chat.template_arguments", "messages is set by the server"),
        ([], '{"add_generation_prompt": false}', "chat.template_arguments", "is set by the server"),
        ([], '{"bos_token": ""}', "chat.template_arguments", "bos_token is set by the server"),
        (['"\\ud800"'], "", "chat.tools[0]", "must be a JSON object"),
        (['{"a": "\\ud800"}'], "", "chat", "surrogate"),
    ],
)
def test_what_cannot_be_given_is_refused(
    directory: Path, tools: list[str], arguments: str, field: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        Tokenizer.load(directory).render_chat([ChatMessage("user", "a")], tools, arguments)
    assert [each.field for each in refused.value.violations] == [field]


def test_as_deep_as_may_be_is_read() -> None:
    inside = '{"a": ' + "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1) + "}"
    assert Conversation.of([ChatMessage("user", "a")], [inside]).tools[0]["a"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        (DEEP, "nested more than"),
        ("[" * 995, "nested more than"),
    ],
)
def test_arguments_of_a_call_are_an_object(directory: Path, arguments: str, said: str) -> None:
    turns = [ChatMessage("user", "a"), ChatMessage("assistant", "", (ToolCall("a"), ToolCall("a", arguments)))]
    with pytest.raises(InvalidRequest, match=said) as refused:
        Tokenizer.load(directory).render_chat(turns)
    assert [each.field for each in refused.value.violations] == ["chat.messages[1].tool_calls[1].arguments"]


def test_a_call_without_arguments_has_none(directory: Path) -> None:
    turns = [ChatMessage("assistant", "", (ToolCall("a"),))]
    assert Tokenizer.load(directory).render_chat(turns).endswith(":a{}<|assistant|>")
