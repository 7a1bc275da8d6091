"""Fields that only the wire can get wrong: each is INVALID_ARGUMENT by name, and the engine never hears of it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from core.errors import InvalidRequest
from core.types.sampling_params import SamplingParams
from core.types.structural_tags import StructuralTags
from service.client import CallFailed
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.wire import facts, generate
from service.wire.constraint import read_constraint
from tests.support.fakes.fake_engine import INFO, info_with
from tests.support.servers import Serve


def chat(*turns: tuple[str, str]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


def asking(tools: list[str], **choice: Any) -> dict[str, Any]:
    """A chat with a choice of tools."""
    turn = pb.ChatMessage(role="user", content="a")
    return {"chat": pb.Chat(messages=[turn], tools=tools, tool_choice=pb.ToolChoice(**choice))}


def shown(content: str, *parts: pb.ContentPart) -> dict[str, Any]:
    """A chat of one turn with these parts."""
    return {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content=content, parts=parts)])}


def tagged(*schemas: str) -> dict[str, Any]:
    """A text with tags of these schemas, behind one of any value."""
    tags = [pb.StructuralTag(begin="<f", json_schema=schema) for schema in ("", *schemas)]
    return {"text": "a", "constraint": pb.Constraint(structural_tags=pb.StructuralTags(tags=tags, triggers=["<f"]))}


BAD: list[tuple[str, dict[str, Any], list[str]]] = [
    ("no input", {}, ["input"]),
    ("empty text", {"text": ""}, ["text"]),
    ("empty ids", {"token_ids": pb.TokenIds()}, ["token_ids.ids"]),
    ("empty chat", {"chat": pb.Chat()}, ["chat.messages"]),
    ("empty role", {"chat": chat(("user", "a"), ("", "b"))}, ["chat.messages[1].role"]),
    (
        "a call without a name",
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="a", tool_calls=[pb.ToolCall(name="a"), pb.ToolCall()])])},
        ["chat.messages[0].tool_calls[1].name"],
    ),
    (
        "too many tools",
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="a")], tools=["{}"] * 129)},
        ["chat.tools"],
    ),
    (
        "more calls than tokens",
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="a", tool_calls=[pb.ToolCall(name="a")] * 2048)] * 2)},
        ["chat.messages"],
    ),
    ("a call required of no tools", asking([], mode=pb.TOOL_MODE_REQUIRED), ["chat.tool_choice"]),
    ("a call by a form that is not known", asking(["{}"], name="a"), ["chat.tool_choice"]),
    (
        "a name and yet no call",
        asking(["{}"], name="a", mode=pb.TOOL_MODE_NONE),
        ["chat.tool_choice", "chat.tool_choice.name"],
    ),
    ("a mode of another server", asking(["{}"], mode=7), ["chat.tool_choice.mode"]),
    *(
        (f"a tag of {what}", tagged(schema), ["constraint.structural_tags.tags[1].json_schema"])
        for what, schema in (
            ("half a schema", "{"),
            ("a number", "1"),
            ("null", "null"),
            ("depth", "[" * 100_000),
            ("some depth", '{"a":' + "[" * 930 + "]" * 930 + "}"),
            ("no great depth", '{"a":' + "[" * 64 + "]" * 64 + "}"),
            ("length", '{"a": "' + "x" * 70_000 + '"}'),
        )
    ),
    (
        "parts beside a text, in the second turn",
        {
            "chat": pb.Chat(
                messages=[
                    pb.ChatMessage(role="user", content="a"),
                    pb.ChatMessage(role="user", content="a", parts=[pb.ContentPart(text="b")]),
                ]
            )
        },
        ["chat.messages[1].content"],
    ),
    ("parts beside a text", shown("a", pb.ContentPart(text="b")), ["chat.messages[0].content"]),
    ("a part of nothing", shown("", pb.ContentPart(text="b"), pb.ContentPart()), ["chat.messages[0].parts[1]"]),
    ("an image", shown("", pb.ContentPart(image=pb.Image())), ["chat.messages[0].parts[0]"]),
    ("more parts than tokens", shown("", *[pb.ContentPart(text="b")] * 5000), ["chat.messages"]),
    ("seventeen images", {"text": "a", "images": [pb.Image()] * 17}, ["images"]),
    ("too many tags", tagged(*["{}"] * 129), ["constraint.structural_tags"]),
    ("long role", {"chat": chat(("x" * 65, "a"))}, ["chat.messages[0].role"]),
    ("id too long", {"text": "a", "request_id": "x" * 129}, ["request_id"]),
    ("id with a space", {"text": "a", "request_id": "a b"}, ["request_id"]),
    ("id with a newline", {"text": "a", "request_id": "ab\n"}, ["request_id"]),
    ("id not ascii", {"text": "a", "request_id": "é"}, ["request_id"]),
    ("salt too long", {"text": "a", "cache_salt": "x" * 257}, ["cache_salt"]),
    ("negative wait", {"text": "a", "queue_timeout": Duration(seconds=-1)}, ["queue_timeout"]),
    ("negative nanos", {"text": "a", "queue_timeout": Duration(nanos=-1)}, ["queue_timeout"]),
    ("mixed signs", {"text": "a", "queue_timeout": Duration(seconds=1, nanos=-1)}, ["queue_timeout"]),
    ("nanos overflow", {"text": "a", "queue_timeout": Duration(nanos=10**9)}, ["queue_timeout"]),
    ("zero wait", {"text": "a", "queue_timeout": Duration()}, ["queue_timeout"]),
    ("wait beyond range", {"text": "a", "queue_timeout": Duration(seconds=2**62)}, ["queue_timeout"]),
    (
        "two values of logprobs",
        {
            "text": "a",
            "sampling_params": pb.SamplingParams(logprobs=True, top_logprobs=1),
            "output_options": pb.OutputOptions(logprobs=False, top_logprobs=2),
        },
        ["output_options.logprobs", "output_options.top_logprobs"],
    ),
    (
        "several at once",
        {"request_id": "?", "cache_salt": "x" * 300},
        ["request_id", "cache_salt", "input"],
    ),
]


@pytest.mark.parametrize(("fields", "named"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
async def test_bad_requests_never_reach_the_engine(serve: Serve, fields: dict[str, Any], named: list[str]) -> None:
    async with serve() as serving:
        call = serving.stub.Generate(pb.GenerateRequest(**fields))
        with pytest.raises(Exception) as failed:
            _ = [response async for response in call]
        assert serving.engine.streams == []
    error = CallFailed(failed.value)
    assert (error.code.name, sorted(error.fields)) == ("INVALID_ARGUMENT", sorted(named))


async def test_abort_needs_an_id(serve: Serve) -> None:
    async with serve() as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.abort("")
    assert list(failed.value.fields) == ["request_id"]


def test_chat_needs_a_template() -> None:
    request = pb.GenerateRequest(chat=chat(("user", "hi")))
    with pytest.raises(InvalidRequest) as failed:
        generate.generate_request(request, info_with(has_chat_template=False), None)
    assert [each.field for each in failed.value.violations] == ["chat"]


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
def test_flags_of_tags_are_read(flags: tuple[bool, bool]) -> None:
    tags = tagged()["constraint"]
    tags.structural_tags.at_least_one, tags.structural_tags.stop_after_first = flags
    found = read_constraint(pb.GenerateRequest(text="a", constraint=tags))
    assert found is not None
    told = StructuralTags.of_source(found.source)
    assert (told.at_least_one, told.stop_after_first) == flags and told.triggers == ("<f",)


@pytest.mark.parametrize("library", ["", "xgrammar"])
def test_calls_are_required_by_llguidance_alone(library: str) -> None:
    request = pb.GenerateRequest(**asking(["{}"], name="a"))
    served = info_with(answer_form="hermes", grammar_backend=library)
    with pytest.raises(InvalidRequest, match="needs llguidance") as failed:
        generate.generate_request(request, served, None)
    assert [each.field for each in failed.value.violations] == ["chat.tool_choice"]
    generate.generate_request(request, info_with(answer_form="hermes", grammar_backend="llguidance"), None)


def test_sampling_fields_are_the_same_on_both_sides() -> None:
    wire = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert wire == set(SamplingParams.__dataclass_fields__)


def test_every_sampling_field_survives_the_wire() -> None:
    asked = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=-0.3,
        presence_penalty=0.4,
        max_tokens=17,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        seed=2**63 - 1,
        n=4,
        logit_bias={7: -1.5, 9: 100.0},
        logprobs=True,
        top_logprobs=3,
        skip_special_tokens=False,
        include_stop_in_output=True,
        logprob_token_ids=(7, 7, 0),
        prompt_logprobs=0,
    )
    message = pb.GenerateRequest(text="a", sampling_params=facts.sampling_message(asked))
    received = pb.GenerateRequest.FromString(message.SerializeToString())
    assert generate.sampling_params(received, INFO.default_sampling) == asked


def test_output_options_are_a_second_spelling() -> None:
    message = pb.GenerateRequest(text="a", output_options=pb.OutputOptions(logprobs=True, top_logprobs=2))
    sampling = generate.sampling_params(message, SamplingParams())
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 2)


def test_durations_become_seconds() -> None:
    message = pb.GenerateRequest(text="a", queue_timeout=Duration(seconds=1, nanos=500_000_000))
    assert generate.generate_request(message, INFO, 12.0).queue_timeout == 1.5
    assert generate.generate_request(message, INFO, 12.0).deadline == 12.0
    assert generate.duration(float("nan")) is None
    assert generate.duration(1.5) == Duration(seconds=1, nanos=500_000_000)
