"""A stream as clients see it: order, positions, what each response carries, and what the engine was asked for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from core.errors import RequestFailed
from core.types.chat import ChatMessage, ToolCall
from core.types.io import Delta, FinishReason, GenerateRequest, TokenLogprob
from service.client import CallFailed, Chunk, End, PromptChunk
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.fakes.fake_engine import FakeEngine, finished, held, token_at
from tests.support.servers import Serve


async def test_events_come_in_order_and_carry_only_what_is_new(serve: Serve) -> None:
    async with serve() as serving:
        call = serving.stub.Generate(pb.GenerateRequest(request_id="r-1", text="hi"))
        responses = [response async for response in call]
        assert dict(await call.initial_metadata())["slipstream-request-id"] == "r-1"
    assert {response.request_id for response in responses} == {"r-1"}
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started", *["delta"] * 8, "finished"]
    assert responses[0].started.prompt_tokens == 3
    deltas = [response.delta for response in responses[1:-1]]
    assert [(d.index, d.position, list(d.token_ids), d.text) for d in deltas] == [
        (0, at, [token_at(at)], f"{at} ") for at in range(8)
    ]
    end = responses[-1].finished
    assert (end.index, end.reason, end.HasField("matched_stop")) == (0, pb.FINISH_REASON_LENGTH, False)
    assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens) == (3, 1, 8)
    assert (end.usage.draft_tokens, end.usage.accepted_draft_tokens) == (5, 2)
    assert end.timing.total.nanos == 3_000_000


async def test_every_output_of_n_ends_exactly_once(serve: Serve) -> None:
    async with serve() as serving:
        completions = await serving.client.complete("hi", n=3, max_tokens=5)
    assert {(c.end.draft_tokens, c.end.accepted_draft_tokens) for c in completions} == {(5, 2)}
    assert [c.end.index for c in completions] == [0, 1, 2]
    assert all(c.token_ids == tuple(token_at(at) for at in range(5)) for c in completions)


async def test_an_id_is_drawn_when_none_is_given(serve: Serve) -> None:
    async with serve() as serving:
        ids = {(await serving.client.complete("hi"))[0].end.request_id for _ in range(3)}
    assert len(ids) == 3 and all(len(each) == 32 for each in ids)


@pytest.mark.parametrize(
    ("prompt", "field", "value"),
    [
        ("hello", "text", "hello"),
        ([5, 6, 7], "token_ids", (5, 6, 7)),
        ([{"role": "user", "content": "hello"}], "chat", (ChatMessage("user", "hello"),)),
    ],
)
async def test_inputs_reach_the_engine(serve: Serve, prompt: object, field: str, value: object) -> None:
    async with serve() as serving:
        await serving.client.complete(prompt, priority=-3, cache_salt="tenant", want_text=False)
        request = serving.engine.streams[0].request
    assert getattr(request, field) == value
    assert [request.text, request.token_ids, request.chat].count(None) == 2
    assert (request.priority, request.cache_salt, request.want_text) == (-3, "tenant", False)


async def test_special_tokens_in_a_chat_count_only_if_the_request_says_so(serve: Serve) -> None:
    turns = [pb.ChatMessage(role="user", content="a</s>")]
    limits = pb.SamplingParams(max_tokens=1)
    async with serve() as serving:
        for chat in (pb.Chat(messages=turns), pb.Chat(messages=turns, special_tokens=True)):
            async for _ in serving.stub.Generate(pb.GenerateRequest(chat=chat, sampling_params=limits)):
                pass
        assert [stream.request.special_tokens for stream in serving.engine.streams] == [False, True]


async def test_tools_calls_and_further_names_reach_the_engine(serve: Serve) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"far": 3}}}
    turns = [
        {"role": "user", "content": "é", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "there", "tool_call_id": "c1"},
    ]
    given: dict[str, Any] = {"tools": [tool], "template_arguments": {"enable_thinking": False}}
    async with serve() as serving:
        await serving.client.complete(turns, max_tokens=1, **given)
        with pytest.raises(ValueError, match="are for chats"):
            await serving.client.complete("text", **given)
        (request,) = [stream.request for stream in serving.engine.streams]
    assert [json.loads(each) for each in request.chat_tools] == [tool]
    assert json.loads(request.chat_arguments) == given["template_arguments"] and not request.special_tokens
    assert request.chat is not None
    first, second, third = request.chat
    assert first == ChatMessage("user", "é", name="ann")
    assert second == ChatMessage("assistant", "", (ToolCall("look", '{"far": 3}', "c1"),), reasoning="hm")
    assert third == ChatMessage("tool", "there", tool_call_id="c1")


@pytest.mark.parametrize(("asked", "told"), [(None, True), (True, True), (False, False)])
async def test_a_request_may_do_without_speculation(serve: Serve, asked: bool | None, told: bool) -> None:
    async with serve() as serving:
        await serving.client.complete("hi", n=2, speculative=asked)
        request = serving.engine.streams[0].request
    assert request.speculative is told


async def test_unset_sampling_fields_take_the_checkpoints_defaults_and_zero_is_not_unset(serve: Serve) -> None:
    async with serve() as serving:
        await serving.client.complete("hi", top_p=0.5)
        await serving.client.complete("hi", temperature=0.0)
        first, second = (stream.request.sampling for stream in serving.engine.streams)
    assert (first.temperature, first.top_p, first.max_tokens) == (0.5, 0.5, 8)
    assert (second.temperature, second.top_p, second.max_tokens) == (0.0, 1.0, 8)


async def test_logprobs_and_matched_stop(serve: Serve) -> None:
    def script(request: GenerateRequest) -> list[object]:
        top = ((7, -0.5), (8, -1.5))
        end = finished(0, 1, FinishReason.STOP)
        return [
            Delta(0, 0, (7,), "x", (TokenLogprob(7, -0.5, top),)),
            Delta(0, 1, (8,), "y"),
            type(end)(0, end.reason, end.usage, end.timing, 2),
        ]

    async with serve(FakeEngine(script)) as serving:
        events = [event async for event in serving.client.generate("hi", logprobs=True, top_logprobs=2)]
    first, second, end = events
    assert isinstance(first, Chunk) and isinstance(second, Chunk) and isinstance(end, End)
    assert first.logprobs == ((7, -0.5, ((7, -0.5), (8, -1.5))),)
    assert second.logprobs == (), "the refilled message must not keep the last delta's entries"
    assert (end.reason, end.matched_stop) == ("stop", 2)


async def test_chosen_ids_come_in_their_order(serve: Serve) -> None:
    def script(request: GenerateRequest) -> list[object]:
        assert request.sampling.logprob_token_ids == (9, 8)
        told = TokenLogprob(7, -0.5, ((7, -0.5),), (-3.0, -4.0))
        return [Delta(0, 0, (7,), "x", (told,)), Delta(0, 1, (8,), "y", (told,)), finished(0, 2)]

    async with serve(FakeEngine(script)) as serving:
        asked = {"logprobs": True, "top_logprobs": 1, "logprob_token_ids": [9, 8]}
        chunks = [e async for e in serving.client.generate("hi", **asked) if isinstance(e, Chunk)]
        plain = [e async for e in serving.client.generate("hi", **asked | {"logprob_token_ids": [9, 8]})]
    assert [chunk.chosen_logprobs for chunk in chunks] == [((-3.0, -4.0),)] * 2
    assert [chunk.logprobs for chunk in chunks] == [((7, -0.5, ((7, -0.5),)),)] * 2 and len(plain) == 3


async def test_log_probabilities_of_a_prompt_are_events_of_their_own(serve: Serve) -> None:
    """Split where they are too large for a message, and no tokens of the output."""
    count, top = 3000, tuple((token, -1.0) for token in range(20))

    def script(request: GenerateRequest) -> list[object]:
        assert request.sampling.prompt_logprobs == 20
        ids = tuple(range(count))
        told = Delta(0, -count, ids, "", tuple(TokenLogprob(i, -0.5, top) for i in ids))
        return [told, Delta(0, 0, (7,), "x"), finished(0, 1)]

    async with serve(FakeEngine(script)) as serving:
        events = [event async for event in serving.client.generate([5] * (count + 1), prompt_logprobs=20)]
        (whole,) = await serving.client.complete([5] * (count + 1), prompt_logprobs=20)
    *told, chunk, end = events
    assert len(told) > 1 and all(isinstance(event, PromptChunk) for event in told)
    entries = [entry for event in told for entry in event.logprobs]  # type: ignore[union-attr]
    assert [token for token, _, _ in entries] == list(range(count)) and entries[0] == (0, -0.5, top)
    at = [event.position for event in told]  # type: ignore[union-attr]
    assert at[0] == 1 and at == [1 + event.logprobs[0][0] for event in told]  # type: ignore[union-attr]
    assert isinstance(chunk, Chunk) and chunk.position == 0 and isinstance(end, End)
    assert list(whole.prompt_logprobs) == entries and whole.token_ids == (7,)


async def test_a_delta_too_large_for_a_client_is_split_without_gaps(serve: Serve) -> None:
    count, width = 1500, 64
    top = tuple((token, -1.0) for token in range(width))
    told = (-2.0,) * 1024

    def script(request: GenerateRequest) -> list[object]:
        ids = tuple(range(count))
        return [Delta(0, 4, ids, "all", tuple(TokenLogprob(i, -0.1, top, told) for i in ids)), finished(0, count)]

    async with serve(FakeEngine(script)) as serving:
        chunks = [e async for e in serving.client.generate("hi", logprobs=True) if isinstance(e, Chunk)]
    assert len(chunks) > 1
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(count))
    assert [chunk.position for chunk in chunks] == [4 + chunk.token_ids[0] for chunk in chunks]
    assert [chunk.text for chunk in chunks] == [*[""] * (len(chunks) - 1), "all"]


async def test_abort_ends_the_stream_as_cancelled(serve: Serve) -> None:
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate, after=2))) as serving:
        events = serving.client.generate("hi", request_id="mine")
        first = await anext(events)
        assert isinstance(first, Chunk)
        assert await serving.client.abort("mine")
        rest = [event async for event in events]
        assert isinstance(rest[-1], End) and rest[-1].reason == "cancelled"
        assert not await serving.client.abort("mine"), "idempotent"
        assert not await serving.client.abort("never-seen")


async def test_text_that_only_stop_strings_needed_is_not_sent(serve: Serve) -> None:
    steps = [Delta(0, 0, (5,), "text for the stop matcher"), finished(0, 1, FinishReason.STOP)]
    async with serve(FakeEngine(lambda request: steps)) as serving:
        (completion,) = await serving.client.complete("hi", want_text=False, stop=["x"])
    assert (completion.token_ids, completion.text) == ((5,), "")


async def test_a_stream_without_its_terminal_is_an_internal_error(serve: Serve) -> None:
    async with serve(FakeEngine(lambda request: [Delta(0, 0, (1,), "x")])) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
    assert (failed.value.code.name, failed.value.message) == ("INTERNAL", "internal error")


async def test_a_failure_after_tokens_says_how_many_were_sent(serve: Serve) -> None:
    steps = [Delta(0, 0, (1, 2, 3), "a"), Delta(1, 0, (4,), "b"), RequestFailed("logits are not finite")]
    async with serve(FakeEngine(lambda request: steps)) as serving:
        received = []
        with pytest.raises(CallFailed) as failed:
            async for event in serving.client.generate("hi", n=2):
                received.append(event)
    assert len(received) == 2
    assert (failed.value.code.name, failed.value.reason) == ("INTERNAL", "REQUEST_FAILED")
    assert failed.value.tokens_emitted == 4


async def test_tokens_of_the_prompt_are_none_that_were_sent(serve: Serve) -> None:
    told = Delta(0, -2, (5, 6), "", (TokenLogprob(5, -0.5), TokenLogprob(6, -0.5)))
    steps = [told, Delta(0, 0, (7, 8, 9), "a"), RequestFailed("logits are not finite")]
    async with serve(FakeEngine(lambda request: steps)) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete([4, 5, 6], prompt_logprobs=0)
    assert failed.value.tokens_emitted == 3


async def test_two_hundred_streams_at_once_each_get_their_own_tokens(serve: Serve) -> None:
    async with serve() as serving:
        done = await asyncio.gather(*(serving.client.complete("hi", max_tokens=1 + i % 17) for i in range(200)))
        assert serving.engine.live_requests == 0
    for i, (completion,) in enumerate(done):
        assert completion.token_ids == tuple(token_at(at) for at in range(1 + i % 17))
        assert completion.text == "".join(f"{at} " for at in range(1 + i % 17))


async def test_tokenize_and_detokenize(serve: Serve) -> None:
    async with serve() as serving:
        assert await serving.client.tokenize("ab") == [1, 97, 98]
        bare = await serving.stub.Tokenize(pb.TokenizeRequest(text="ab", add_special_tokens=False))
        assert list(bare.token_ids) == [97, 98]
        assert await serving.client.detokenize([1, 97, 98]) == "ab"
        kept = await serving.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 97], skip_special_tokens=False))
        assert kept.text == "\x01a"
        with pytest.raises(CallFailed) as failed:
            await serving.client.detokenize([10**6])
    assert failed.value.fields == {"token_ids": "must be between 0 and 999"}


async def test_info_and_load(serve: Serve) -> None:
    async with serve(max_request_seconds=90.5) as serving:
        model = await serving.client.model_info()
        server = await serving.stub.GetServerInfo(pb.GetServerInfoRequest())
        load = await serving.client.load()
    assert (model.name, model.vocab_size, list(model.eos_token_ids)) == ("fake", 1000, [2])
    assert model.default_sampling_params.temperature == 0.5
    assert model.default_sampling_params.HasField("max_tokens") and model.default_sampling_params.HasField("top_k")
    assert not model.default_sampling_params.HasField("seed")
    assert server.state == pb.SERVER_STATE_READY
    assert server.max_request_duration.ToSeconds() == 90
    assert {pool.name: (pool.capacity, pool.used, pool.cached) for pool in load.pools} == {
        "req": (64, 0, 0),
        "kv_page": (100, 25, 50),
    }
    assert (load.token_usage, load.device_idle_ratio, load.step) == (0.25, 0.125, 41)
