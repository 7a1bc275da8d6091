"""Generate in both dialects over a scripted engine: chunks, wholes, stop tokens, aborts, statuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from core.errors import Overloaded, RequestFailed, SlipstreamError
from core.types.io import Delta, Finished, FinishReason, GenerateRequest, Timing, TokenLogprob, Usage
from service.client import CallFailed
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.contract.gateway.spoken import DIALECTS, Spoken
from tests.support.fakes.fake_engine import FakeEngine, count_up, finished, held, token_at
from tests.support.servers import Serve
from tests.support.until import until

IDS = [5, 6, 7]


async def spoken_of(call: Any) -> tuple[list[Any], list[Any]]:
    """Chunks and wholes of a call."""
    chunks, wholes = [], []
    while (response := await call.read()) is not grpc.aio.EOF:
        if response.WhichOneof("response") == "chunk":
            chunks.append(response.chunk)
        else:
            wholes.append(response.complete)
    return chunks, wholes


async def failure_of(call: Any) -> CallFailed:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await spoken_of(call)
    return CallFailed(failed.value)


async def test_a_stream_has_new_ids_in_chunks_and_everything_once_more_at_the_end(serve: Serve, spoken: Spoken) -> None:
    async with serve() as serving:
        stub = spoken.stub(serving.client.channel)
        call = stub.Generate(spoken.generate(IDS, request_id="r", stream=True, params={"max_tokens": 5}))
        chunks, (whole,) = await spoken_of(call)
        request = serving.engine.streams[0].request
    assert [list(each.token_ids) for each in chunks] == [[token_at(at)] for at in range(5)]
    assert [each.completion_tokens for each in chunks] == [1, 2, 3, 4, 5]
    assert {each.prompt_tokens for each in chunks} == {3}
    assert list(whole.output_ids) == [token_at(at) for at in range(5)]
    assert (whole.finish_reason, whole.prompt_tokens, whole.cached_tokens, whole.completion_tokens) == (
        "length",
        3,
        1,
        5,
    )
    assert whole.WhichOneof("matched_stop") is None
    assert (whole.spec_draft_tokens, whole.spec_accepted_tokens) == (5, 2)
    assert (request.request_id, request.token_ids, request.want_text) == ("r", (5, 6, 7), False)


async def test_without_stream_only_wholes_come_one_per_output(serve: Serve, spoken: Spoken) -> None:
    async with serve() as serving:
        stub = spoken.stub(serving.client.channel)
        chunks, wholes = await spoken_of(stub.Generate(spoken.generate(IDS, params={"max_tokens": 3, "n": 3})))
    assert chunks == [] and sorted(each.index for each in wholes) == [0, 1, 2]
    assert all(list(each.output_ids) == [token_at(at) for at in range(3)] for each in wholes)


def ends_with(*ids: int, matched: int | str | None = None) -> Any:
    """A script of one token per delta, each with a log probability, that stops on `matched`."""

    def script(request: GenerateRequest) -> Any:
        for at, token in enumerate(ids):
            entries = (TokenLogprob(token, -float(at), ((token, -float(at)), (1, -9.0))),)
            yield Delta(0, at, (token,), "", entries if request.sampling.logprobs else ())
        usage = Usage(3, 0, len(ids))
        yield Finished(0, FinishReason.STOP, usage, Timing(0.0, 0.0, 0.0), matched)

    return script


@pytest.mark.parametrize("matched", [2, "end", None])
async def test_the_end_is_told_with_every_id_and_its_log_probability(
    serve: Serve, spoken: Spoken, matched: int | str | None
) -> None:
    request = spoken.generate(IDS, stream=True, **spoken.logprobs(1))
    async with serve(FakeEngine(ends_with(40, 2, 41, 2, matched=matched))) as serving:
        chunks, (whole,) = await spoken_of(spoken.stub(serving.client.channel).Generate(request))
    assert [token for each in chunks for token in each.token_ids] == [40, 2, 41, 2] == list(whole.output_ids)
    assert chunks[-1].completion_tokens == whole.completion_tokens == 4
    for rows in (*(each.output_logprobs for each in chunks), whole.output_logprobs):
        assert len(rows.token_logprobs) == len(rows.token_ids) == len(rows.top_logprobs)
        assert all(list(each.token_ids) == [token, 1] for token, each in zip(rows.token_ids, rows.top_logprobs))
    assert list(whole.output_logprobs.token_ids) == [40, 2, 41, 2]
    assert list(whole.output_logprobs.token_logprobs) == [0.0, -1.0, -2.0, -3.0]
    told = whole.WhichOneof("matched_stop")
    assert (None if told is None else getattr(whole, told)) == matched


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_prompt_is_told_with_the_first_chunk_and_at_the_end(
    serve: Serve, spoken: Spoken, stream: bool, n: int
) -> None:
    """Of vLLM's dialect from the first token on, which has none; of SGLang's from the place that is asked for."""
    entry = TokenLogprob(0, -1.0, ((8, -0.5),))

    def script(request: GenerateRequest) -> Any:
        assert request.sampling.prompt_logprobs == 1 and request.token_ids is not None
        # In several parts, as a long prompt is told.
        for place in range(1, 4):
            token = request.token_ids[place]
            yield Delta(0, place - 4, (token,), "", (replace(entry, token_id=token),))
        for index in range(n):
            yield Delta(index, 0, (40,), "")
            yield Delta(index, 1, (41,), "")
            yield Finished(index, FinishReason.LENGTH, Usage(3, 0, 2), Timing(0.0, 0.0, 0.0), None)

    vllm = spoken.name == "vllm"
    fields: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 3}
    params = {"n": n, "prompt_logprobs": 1} if vllm else {"n": n}
    request = spoken.generate([31, 32, 33, 34], params=params, stream=stream, **({} if vllm else fields))
    async with serve(FakeEngine(script)) as serving:
        chunks, wholes = await spoken_of(spoken.stub(serving.client.channel).Generate(request))
    assert len(wholes) == n and len(chunks) == (2 * n if stream else 0)
    ids = [31, 32, 33, 34] if vllm else [34]
    for each in (*(chunk for chunk in chunks if list(chunk.token_ids) == [40]), *wholes):
        told = each.input_logprobs
        assert list(told.token_ids) == ids
        values = [one.value if one.HasField("value") else None for one in told.token_logprobs]
        assert values == ([None, -1.0, -1.0, -1.0] if vllm else [-1.0])
        ranked = [[] if value is None else [8] for value in values]
        assert [list(one.token_ids) for one in told.top_logprobs] == ranked
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks if list(chunk.token_ids) == [41])


async def test_chosen_ids_are_told_beside_each_token(serve: Serve) -> None:
    def script(request: GenerateRequest) -> Any:
        yield Delta(0, 0, (40, 41), "", tuple(TokenLogprob(token, -1.0, (), (-2.0, -3.0)) for token in (40, 41)))
        yield Finished(0, FinishReason.LENGTH, Usage(3, 0, 2), Timing(0.0, 0.0, 0.0), None)

    sglang = DIALECTS[0]
    request = sglang.generate(IDS, stream=True, return_logprob=True, token_ids_logprob=[9, 8])
    async with serve(FakeEngine(script)) as serving:
        (chunk,), (whole,) = await spoken_of(sglang.stub(serving.client.channel).Generate(request))
    for rows in (chunk.output_logprobs, whole.output_logprobs):
        told = [(list(each.token_ids), list(each.values)) for each in rows.token_ids_logprobs]
        assert told == [([9, 8], [-2.0, -3.0])] * 2 and len(rows.token_logprobs) == 2


async def test_wholes_without_chunks_come_in_their_order(serve: Serve, spoken: Spoken) -> None:
    """The gateway numbers the choices of an answer as they come."""

    def backwards(request: GenerateRequest) -> Any:
        for index in reversed(range(request.sampling.n)):
            yield Delta(index, 0, (40 + index,))
            yield finished(index, 1)

    async with serve(FakeEngine(backwards)) as serving:
        stub = spoken.stub(serving.client.channel)
        _, wholes = await spoken_of(stub.Generate(spoken.generate(IDS, params={"n": 3})))
        chunks, streamed = await spoken_of(stub.Generate(spoken.generate(IDS, stream=True, params={"n": 3})))
    assert [(each.index, list(each.output_ids)) for each in wholes] == [(0, [40]), (1, [41]), (2, [42])]
    assert [each.index for each in chunks] == [each.index for each in streamed] == [2, 1, 0]


async def test_an_abort_wakes_the_stream_and_a_second_one_finds_nothing(serve: Serve, spoken: Spoken) -> None:
    async with serve(FakeEngine(held(asyncio.Event()))) as serving:
        stub = spoken.stub(serving.client.channel)
        call = stub.Generate(spoken.generate(IDS, request_id="r", stream=True))
        await call.read()
        answers = [await stub.Abort(spoken.abort("r"))]
        _, (whole,) = await spoken_of(call)
        assert whole.finish_reason == "abort"
        answers += [await stub.Abort(spoken.abort("r")), await stub.Abort(spoken.abort("never"))]
        if spoken.name == "sglang":
            assert [each.success for each in answers] == [True, False, False]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Abort(spoken.abort(""))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: serving.engine.live_requests == 0)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_cancelled_call_closes_the_engines_stream(serve: Serve, spoken: Spoken, streams: bool) -> None:
    async with serve(FakeEngine(held(asyncio.Event()))) as serving:
        call = spoken.stub(serving.client.channel).Generate(spoken.generate(IDS, stream=streams))
        opened = await serving.engine.stream_number(1)
        call.cancel()
        async with asyncio.timeout(10):
            await opened.closed.wait()
        await until(lambda: serving.engine.live_requests == 0)


async def test_headers_wait_for_the_first_token(serve: Serve, spoken: Spoken) -> None:
    """A client that gets headers may no longer send its request elsewhere."""
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate, after=0))) as serving:
        call = spoken.stub(serving.client.channel).Generate(spoken.generate(IDS, stream=True))
        await serving.engine.stream_number(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call.initial_metadata()), 0.1)
        gate.set()
        await call.initial_metadata()
        call.cancel()


async def test_a_failure_after_tokens_says_how_many_went_out(serve: Serve, spoken: Spoken) -> None:
    def script(request: GenerateRequest) -> Any:
        yield from list(count_up(request))[:2]
        yield RequestFailed("logits are not finite")

    async with serve(FakeEngine(script)) as serving:
        stub = spoken.stub(serving.client.channel)
        failed = await failure_of(stub.Generate(spoken.generate(IDS, stream=True)))
        whole = await failure_of(stub.Generate(spoken.generate(IDS)))
    assert (failed.code, failed.reason, failed.tokens_emitted) == (grpc.StatusCode.INTERNAL, "REQUEST_FAILED", 2)
    assert whole.tokens_emitted == 0


async def test_a_stream_that_ends_early_is_a_bug_and_not_an_answer(serve: Serve, spoken: Spoken) -> None:
    async with serve(FakeEngine(lambda _: [finished(0, 0)])) as serving:
        stub = spoken.stub(serving.client.channel)
        failed = await failure_of(stub.Generate(spoken.generate(IDS, params={"n": 2})))
    assert failed.code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("the waiting queue is full", reason="QUEUE_FULL"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (RuntimeError("a bug"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_refusals_have_the_status_of_our_own_service_and_are_counted(
    serve: Serve, spoken: Spoken, error: Exception, code: grpc.StatusCode
) -> None:
    engine = FakeEngine()
    engine.refuse_with = error
    async with serve(engine) as serving:
        failed = await failure_of(spoken.stub(serving.client.channel).Generate(spoken.generate(IDS)))
        assert failed.code is code
        counted = await serving.metric(
            f'slipstream_rpc_handled_total{{code="{code.name}",method="{spoken.service}/Generate"}}'
        )
        assert counted == 1
        if isinstance(error, SlipstreamError):
            assert await serving.metric('slipstream_requests_rejected_total{reason="QUEUE_FULL"}') == 1


async def test_limits_are_shared_with_our_own_service(serve: Serve, spoken: Spoken) -> None:
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate)), max_concurrent_requests=1, admission_wait=0.05) as serving:
        own = serving.client.generate("hi")
        await anext(own)
        failed = await failure_of(spoken.stub(serving.client.channel).Generate(spoken.generate(IDS)))
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CONCURRENCY_LIMIT")
        await own.aclose()


async def test_deadlines_are_the_callers_and_the_servers(serve: Serve, spoken: Spoken) -> None:
    async with serve(FakeEngine(held(asyncio.Event())), max_request_seconds=0.1) as serving:
        failed = await failure_of(spoken.stub(serving.client.channel).Generate(spoken.generate(IDS, stream=True)))
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert serving.engine.live_requests == 0


async def test_only_who_started_a_request_ends_it_whatever_service_is_asked(
    serve: Serve, spoken: Spoken, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{'a' * 20}\nbob:{'b' * 20}\n")
    alice, bob = ((("authorization", f"Bearer {letter * 20}"),) for letter in "ab")
    async with serve(FakeEngine(held(asyncio.Event())), auth_token_file=str(tokens)) as serving:
        stub = spoken.stub(serving.client.channel)
        call = stub.Generate(spoken.generate(IDS, request_id="r", stream=True), metadata=alice)
        await call.read()
        assert serving.engine.streams[0].request.cache_salt == "alice\0"
        await stub.Abort(spoken.abort("r"), metadata=bob)
        assert not (await serving.stub.Abort(pb.AbortRequest(request_id="r"), metadata=bob)).found
        assert serving.engine.live_requests == 1
        await stub.Abort(spoken.abort("r"), metadata=alice)
        _, (whole,) = await spoken_of(call)
        own = serving.stub.Generate(pb.GenerateRequest(request_id="s", text="hi"), metadata=alice)
        await own.read()
        await stub.Abort(spoken.abort("s"), metadata=bob)
        assert serving.engine.live_requests == 1
        own.cancel()
    assert whole.finish_reason == "abort"
