"""Answers that the server reads: typed parts over real sockets, from the real engine and from a scripted one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import AutoTokenizer

from core.types.chat import AnswerKind, AnswerPart, ToolCall
from core.types.io import Delta, GenerateRequest
from service.client import Call, CallFailed, Chunk, End, Part, SlipstreamClient, answer_turn
from service.config.server_config import ServerConfig
from service.engine.builder import build_core_engine
from service.frontends.group import FrontEndGroup
from service.server.server import Server
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes.fake_engine import FakeEngine, Step, finished
from tests.support.servers import Serve, loaded

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.id }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if thinks %}<think>\n{% endif %}{% endif %}"
)
TURNS = [{"role": "user", "content": "where?"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"far": {"type": "integer"}}}}}
VOCAB = 322
THINK, THOUGHT = VOCAB - 2, VOCAB - 1
CALL = '<tool_call>\n{"name": "look", "arguments": {"far": 3, "who": "é"}}\n</tool_call>'


def tool(name: str, **more: Any) -> dict[str, Any]:
    """A tool with one argument, and `more` in its schema."""
    far = {"properties": {"far": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["far"]}
    schema = {"type": "object", **far, "additionalProperties": False, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def checkpoint(directory: Path, template: str = TEMPLATE) -> str:
    """A model whose tokenizer has the marks of a thought as special tokens, and those of calls as text."""
    folder = make_checkpoint("llama", directory / "model", vocab_size=VOCAB)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


async def parts(client: SlipstreamClient, text: str, turns: list[dict[str, Any]] = TURNS, **given: Any) -> list[Part]:
    """The parts of an answer that can only be `text`, and no other text."""
    found: list[Part] = []
    options = {"tools": [LOOK], "parse_answer": True, "max_tokens": 200, **given}
    async for event in client.generate(turns, constraint={"choice": [text]}, **options):
        if isinstance(event, Chunk):
            assert event.text == ""
            found += event.parts
    return found


async def test_an_answer_comes_in_parts_and_goes_back_as_a_turn(
    tmp_path: Path, config: Callable[..., ServerConfig]
) -> None:
    """Through a front end, so that parts pass between processes."""
    settings = config(model=checkpoint(tmp_path), device="cpu", cpu_threads=1, seed=3, frontends=1)
    server = FrontEndGroup(settings, build_core_engine)
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        info = await client.model_info()
        assert info.answer_form == "hermes"

        found = await parts(client, f"Yes. {CALL}{CALL}")
        turn = answer_turn(found)
        assert turn["content"] == "Yes." and "reasoning_content" not in turn
        calls = turn.get("tool_calls", [])
        assert len(calls) == 2
        first, second = calls
        assert json.loads(first["function"]["arguments"]) == {"far": 3, "who": "é"} and first["id"] != second["id"]
        again = answer_turn(await parts(client, "In the garden.", [*TURNS, turn]))
        assert again == {"role": "assistant", "content": "In the garden."}

        thinks = {"template_arguments": {"thinks": True}}
        assert answer_turn(await parts(client, "hm", **thinks)) == {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
        }
        assert answer_turn(await parts(client, CALL, tools=[])) == {"role": "assistant", "content": CALL}
        both = [event async for event in client.generate(TURNS, parse_answer=True, n=2, max_tokens=5, ignore_eos=True)]
        assert {event.index for event in both} == {0, 1}


async def test_marks_may_be_special_tokens(tmp_path: Path, config: Callable[..., ServerConfig]) -> None:
    """They are read, and not told; without `parse_answer` they are left out of the text as ever."""
    server = Server(config(model=checkpoint(tmp_path), device="cpu", cpu_threads=1, seed=3), build_core_engine)
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        letters = [(await client.tokenize(each))[-1] for each in "hmyes"]
        likely = dict.fromkeys([*letters, THINK], 100.0)
        forced: dict[str, Any] = {"logit_bias": likely, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
        read = [event async for event in client.generate(TURNS, parse_answer=True, seed=5, **forced)]
        plain = [event async for event in client.generate(TURNS, seed=5, **forced)]
        told = [part for event in read if isinstance(event, Chunk) for part in event.parts]
        said = "".join(part.text for part in told if part.kind == "content")
        thought = "".join(part.text for part in told if part.kind == "reasoning")
        text = "".join(event.text for event in plain if isinstance(event, Chunk))
        assert thought and set(said) <= set("hmyes")
        assert said + thought.replace("<think>", "") == text


async def test_calls_can_be_required_of_one_tool_or_any_and_ruled_out(
    tmp_path: Path, config: Callable[..., ServerConfig]
) -> None:
    """A model of random weights draws noise, so every call that comes was made by the mask."""
    tools = [tool("look"), tool("listen")]
    server = Server(config(model=checkpoint(tmp_path), device="cpu", cpu_threads=1, seed=3), build_core_engine)
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        straight = {"logit_bias": {THINK: -100.0}}
        hasty = {"logit_bias": {THOUGHT: 100.0}, "template_arguments": {"thinks": True}}
        for choice, more in (("required", straight), ("listen", straight), ("required", hasty), ("look", hasty)):
            for turn in await turns(client, tools=tools, tool_choice=choice, **more):
                assert turn["content"] == "" and "reasoning_content" not in turn
                names = [call["function"]["name"] for call in turn["tool_calls"]]
                assert set(names) <= {"look", "listen"} if choice == "required" else names == [choice]
                assert all(json.loads(call["function"]["arguments"])["far"] <= 99 for call in turn["tool_calls"])

        assert {part.kind for part in await parts(client, CALL, tool_choice="none")} == {"content"}
        assert [part.kind for part in await parts(client, CALL, tool_choice="auto")] == ["tool_call"]
        lengths = []
        for choice in ("", "auto", "none", "required", "look"):
            (done,) = await client.complete(TURNS, tools=tools, tool_choice=choice, max_tokens=1)
            lengths.append(done.end.prompt_tokens)
        assert lengths[0] == lengths[1] == lengths[3] == lengths[4] > lengths[2], "of what the template is given"


async def turns(client: SlipstreamClient, **given: Any) -> list[dict[str, Any]]:
    """The turns of three answers of one request, which all end by themselves."""
    found: list[list[Part]] = [[], [], []]
    async for event in client.generate(TURNS, parse_answer=True, n=3, temperature=1.0, seed=5, max_tokens=600, **given):
        if isinstance(event, Chunk):
            found[event.index] += event.parts
        else:
            assert isinstance(event, End) and event.reason == "stop", event
    return [answer_turn(each) for each in found]


def unlike(**given: Any) -> dict[str, Any]:
    """A request that requires a call, changed."""
    return {"tools": [tool("look")], "tool_choice": "required", "max_tokens": 40, **given}


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        (unlike(tools=[]), "chat.tool_choice", "no tools"),
        (unlike(tool_choice="listen"), "chat.tool_choice.name", "no tool has this name"),
        (unlike(tools=[tool("look"), {"function": {}}]), "chat.tools[1]", "function.name"),
        (unlike(tools=[tool("look", type="string")]), "chat.tools[0]", "schema of an object"),
        (unlike(tools=[tool("look", unevaluatedItems=False)]), "chat.tools", "unevaluatedItems"),
        (unlike(constraint={"regex": "a"}), "constraint", "chat.tool_choice"),
        (unlike(min_tokens=2), "sampling_params.min_tokens", "constraint"),
        (unlike(ignore_eos=True), "sampling_params.ignore_eos", "constraint"),
    ],
    ids=["no tools", "no such tool", "no name", "no object", "no such keyword", "both", "min_tokens", "ignore_eos"],
)
async def test_a_call_that_cannot_be_required_is_refused_by_field(
    tmp_path: Path, config: Callable[..., ServerConfig], given: dict[str, Any], field: str, says: str
) -> None:
    server = Server(config(model=checkpoint(tmp_path), device="cpu", cpu_threads=1), build_core_engine)
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(TURNS, **given)
        assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT and list(failed.value.fields) == [field]
        assert says in str(failed.value)


async def test_tags_in_free_text_hold_calls_to_their_schemas(
    tmp_path: Path, config: Callable[..., ServerConfig]
) -> None:
    look = tool("look")
    tag = {
        "begin": '<tool_call>\n{"name": "look", "arguments": ',
        "json_schema": look["function"]["parameters"],
        "end": "}\n</tool_call>",
    }
    tags = {"tags": [tag], "triggers": ["<tool_call>"], "at_least_one": True, "stop_after_first": True}
    server = Server(config(model=checkpoint(tmp_path), device="cpu", cpu_threads=1, seed=3), build_core_engine)
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        for turn in await turns(client, tools=[look], constraint={"structural_tags": tags}):
            (call,) = turn["tool_calls"]
            assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"])["far"] <= 99
        asked = client.generate(TURNS, constraint={"structural_tags": {**tags, "triggers": ["x"]}}, max_tokens=1)
        with pytest.raises(CallFailed) as failed:
            _ = [event async for event in asked]
        assert list(failed.value.fields) == ["constraint.structural_tags"]


@pytest.mark.parametrize(
    ("setting", "library", "says"),
    [("glm4", "llguidance", "glm4"), ("none", "llguidance", "--answer-form"), ("auto", "none", "llguidance")],
)
async def test_calls_are_required_where_they_are_json_and_a_library_is_there(
    tmp_path: Path, config: Callable[..., ServerConfig], setting: str, library: str, says: str
) -> None:
    given = {"answer_form": setting, "grammar_backend": library, "device": "cpu", "cpu_threads": 1}
    server = Server(config(model=checkpoint(tmp_path), **given), build_core_engine)
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(TURNS, **unlike())
        assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT and list(failed.value.fields) == [
            "chat.tool_choice"
        ]
        assert says in str(failed.value)
        (done,) = await client.complete(TURNS, tools=[tool("look")], tool_choice="none", max_tokens=1)
        assert done.token_ids


@pytest.mark.parametrize(
    ("template", "setting", "given", "field"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "auto", {}, "chat.parse_answer"),
        (TEMPLATE, "none", {}, "chat.parse_answer"),
        (TEMPLATE, "auto", {"resumable": True}, "chat.parse_answer"),
        (TEMPLATE, "auto", {"want_text": False}, "chat.parse_answer"),
    ],
    ids=["unknown", "none", "resumable", "no text"],
)
async def test_what_cannot_be_read_is_refused(
    tmp_path: Path,
    config: Callable[..., ServerConfig],
    template: str,
    setting: str,
    given: dict[str, Any],
    field: str,
) -> None:
    asked = config(model=checkpoint(tmp_path, template), answer_form=setting, device="cpu", cpu_threads=1)
    server = Server(asked, build_core_engine)
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(TURNS, parse_answer=True, max_tokens=1, **given)
        assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT and list(failed.value.fields) == [field]
        for more in ({"parse_answer": True}, {"tool_choice": "none"}):
            with pytest.raises(ValueError, match="are for chats"):
                await client.complete("text", **more)


def answering(request: GenerateRequest) -> Iterator[Step]:
    """Parts in one delta, then a delta without, which must not have those of the one before."""
    call = AnswerPart(AnswerKind.CALL, call=ToolCall("look", "{}", "c1"))
    told = (AnswerPart(AnswerKind.REASONING, "hm"), AnswerPart(AnswerKind.CONTENT, "yes"), call)
    yield Delta(0, 0, (11,), parts=told)
    yield Delta(0, 1, (12,))
    yield finished(0, 2)


async def test_parts_reach_the_client_as_they_are(serve: Serve) -> None:
    async with serve(FakeEngine(answering)) as serving:
        events = [event async for event in serving.client.generate(TURNS, max_tokens=2)]
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert [part for chunk in chunks for part in chunk.parts] == [
        Part("reasoning", "hm"),
        Part("content", "yes"),
        Part("tool_call", call=Call("c1", "look", "{}")),
    ]


async def test_an_answer_in_no_known_form_is_refused_before_it_is_queued(serve: Serve) -> None:
    async with serve(FakeEngine(answering)) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete(TURNS, parse_answer=True)
        assert list(failed.value.fields) == ["chat.parse_answer"] and "--answer-form" in str(failed.value)
        assert not serving.engine.streams
