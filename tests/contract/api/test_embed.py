"""Embed as clients see it: order, defaults, refusals by field, and every way in which a call ends early."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner, Result
from google.protobuf.duration_pb2 import Duration

from core.errors import InvalidRequest, RequestFailed, SlipstreamError
from core.types.io import GenerateRequest, Pooling
from service.cli.cli import cli
from service.client import CallFailed, Chunk, SlipstreamClient, Vector
from service.config.server_config import ServerConfig
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.server.server import Server
from service.wire.embed import embed_request
from service.wire.message_limits import MAX_EMBED_IDS, MAX_EMBED_INPUTS, MAX_EMBED_NUMBERS
from tests.contract.api.test_cancellation import closed
from tests.contract.api.test_statuses import EXAMPLES
from tests.support.fakes.fake_engine import INFO, FakeEngine, held, info_with
from tests.support.servers import ONCE, Serve, listening
from tests.support.until import PATIENCE, until

METHOD = 'method="slipstream.v1.InferenceService/Embed"'


def text(value: str) -> pb.EmbedInput:
    return pb.EmbedInput(text=value)


def ids(values: list[int]) -> pb.EmbedInput:
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=values))


async def test_vectors_come_in_the_order_of_their_inputs(serve: Serve) -> None:
    async with serve() as serving:
        vectors = await serving.client.embed("abc", [5, 6], "abcdefgh", pooling="mean", normalize=False)
        response = await serving.stub.Embed(pb.EmbedRequest(inputs=[text("ab")], request_id="mine"))
        assert await serving.metric(f'slipstream_rpc_handled_total{{code="OK",{METHOD}}}') == 2
    assert vectors == [
        Vector((3, 0, 0, list(Pooling).index(Pooling.MEAN)), 3, 1),
        Vector((2, 1, 0, list(Pooling).index(Pooling.MEAN)), 2, 1),
        Vector((8, 2, 0, list(Pooling).index(Pooling.MEAN)), 8, 1),
    ]
    assert (response.request_id, response.dimension, response.embeddings[0].usage.completion_tokens) == ("mine", 4, 0)
    assert list(response.embeddings[0].values) == [2, 0, 1, list(Pooling).index(Pooling.LAST)]


async def test_fields_reach_the_engine_and_unset_ones_have_defaults(serve: Serve) -> None:
    async with serve(max_request_seconds=100) as serving:
        await serving.client.embed("a")
        fields: dict[str, Any] = {"request_id": "r", "priority": -3, "cache_salt": "s", "adapter": "b", "dimensions": 2}
        wait = Duration(seconds=1, nanos=500_000_000)
        before = time.monotonic()
        await serving.client.embed("a", pooling="cls", timeout=5, queue_timeout=wait, **fields)
        plain, full = serving.engine.embedded
    assert (plain.pooling, plain.normalize, plain.dimensions) == (Pooling.LAST, True, None)
    assert (plain.priority, plain.queue_timeout, plain.cache_salt, plain.adapter) == (0, None, "", "")
    assert len(plain.request_id) == 32
    assert {name: getattr(full, name) for name in fields} == fields
    assert (full.pooling, full.queue_timeout) == (Pooling.CLS, 1.5)
    assert full.deadline is not None and before < full.deadline < before + 5.1


async def test_the_pooling_of_the_model_is_the_default(serve: Serve) -> None:
    async with serve(FakeEngine(info=info_with(pooling=Pooling.CLS))) as serving:
        await serving.client.embed("a")
        await serving.client.embed("a", pooling="last")
        assert [each.pooling for each in serving.engine.embedded] == [Pooling.CLS, Pooling.LAST]


NO_WAIT = Duration(seconds=-1)

BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no inputs": ({}, ["inputs"]),
    "an input of nothing": ({"inputs": [text("a"), pb.EmbedInput()]}, ["inputs[1].input"]),
    "an empty text": ({"inputs": [text("a"), text("")]}, ["inputs[1].text"]),
    "no ids": ({"inputs": [ids([])]}, ["inputs[0].token_ids.ids"]),
    "too many inputs": ({"inputs": [text("a")] * (MAX_EMBED_INPUTS + 1)}, ["inputs"]),
    "too many ids in one": ({"inputs": [text("a"), ids([5] * 4096)]}, ["inputs[1].token_ids.ids"]),
    "too many ids in all": ({"inputs": [ids([5] * 4095)] * (MAX_EMBED_IDS // 4095 + 1)}, ["inputs"]),
    "a pooling of the future": ({"inputs": [text("a")], "pooling": 4}, ["pooling"]),
    "a negative pooling": ({"inputs": [text("a")], "pooling": -1}, ["pooling"]),
    "an id with a space": ({"inputs": [text("a")], "request_id": "a b"}, ["request_id"]),
    "a long salt": ({"inputs": [text("a")], "cache_salt": "x" * 257}, ["cache_salt"]),
    "a negative wait": ({"inputs": [text("a")], "queue_timeout": NO_WAIT}, ["queue_timeout"]),
    "everything": (
        {"request_id": "?", "pooling": 9, "inputs": [pb.EmbedInput()], "queue_timeout": NO_WAIT},
        ["request_id", "pooling", "inputs[0].input", "queue_timeout"],
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_requests_never_reach_the_engine(serve: Serve, case: str) -> None:
    fields, named = BAD[case]
    async with serve() as serving:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await serving.stub.Embed(pb.EmbedRequest(**fields))
        assert serving.engine.embedded == []
        assert await serving.metric('slipstream_requests_rejected_total{reason="INVALID_REQUEST"}') == 1
    error = CallFailed(failed.value)
    assert (error.code.name, sorted(error.fields)) == ("INVALID_ARGUMENT", sorted(named))


def test_a_call_is_bounded_by_the_queue_and_by_what_a_response_holds() -> None:
    message = pb.EmbedRequest(inputs=[text("a")] * 100)
    assert len(embed_request(message, INFO, 100, None).inputs) == 100
    wide = info_with(embedding_dimension=MAX_EMBED_NUMBERS // 99)
    for info, queued in ((INFO, 99), (wide, 1000)):
        with pytest.raises(InvalidRequest) as refused:
            embed_request(message, info, queued, None)
        assert [each.field for each in refused.value.violations] == ["inputs"]
    message.dimensions = MAX_EMBED_NUMBERS // 100
    assert len(embed_request(message, wide, 1000, None).inputs) == 100


async def test_the_largest_response_is_taken_by_a_client_with_default_limits(serve: Serve) -> None:
    dimension = MAX_EMBED_NUMBERS // MAX_EMBED_INPUTS
    async with serve(FakeEngine(info=info_with(embedding_dimension=dimension))) as serving:
        vectors = await serving.client.embed(*["ab"] * MAX_EMBED_INPUTS, request_id="x" * 128)
    assert sum(len(each.values) for each in vectors) == MAX_EMBED_NUMBERS
    assert vectors[-1].values[0] == 2


@pytest.mark.parametrize(("error", "code", "reason"), EXAMPLES, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("admitted", [False, True])
async def test_errors_look_like_those_of_generate(
    serve: Serve, error: SlipstreamError, code: str, reason: str, admitted: bool
) -> None:
    async with serve(FakeEngine(lambda request: [error])) as serving:
        if not admitted:
            serving.engine.refuse_with = error
        with pytest.raises(CallFailed) as failed:
            await serving.client.embed("hi")
        rejected = await serving.metric(f'slipstream_requests_rejected_total{{reason="{reason}"}}')
        assert all(stream.closed.is_set() for stream in serving.engine.streams)
        assert serving.engine.live_requests == 0
    assert (failed.value.code.name, failed.value.reason, failed.value.message) == (code, reason, error.message)
    assert (rejected > 0) == (not admitted)


async def test_what_is_not_expected_is_hidden(serve: Serve) -> None:
    async with serve(FakeEngine(lambda request: [ValueError("secret")])) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.embed("hi")
    assert (failed.value.code.name, failed.value.message) == ("INTERNAL", "internal error")


async def test_abort_ends_it_as_cancelled_with_a_reason(serve: Serve) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=0))) as serving:
        call = asyncio.create_task(serving.client.embed("hi", request_id="mine"))
        await serving.engine.stream_number(1)
        assert await serving.client.abort("mine")
        with pytest.raises(CallFailed) as failed:
            await call
        assert not await serving.client.abort("mine")
    assert (failed.value.code.name, failed.value.reason) == ("CANCELLED", "REQUEST_ABORTED")


async def test_cancelling_closes_it(serve: Serve) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=0))) as serving:
        call = asyncio.create_task(serving.client.embed("hi"))
        await serving.engine.stream_number(1)
        call.cancel()
        await closed(serving.engine)
        assert await serving.server.tracker.wait_idle(PATIENCE)
        assert serving.engine.live_requests == 0
        assert await serving.metric(f'slipstream_rpc_handled_total{{code="CANCELLED",{METHOD}}}') == 1


async def test_the_clients_deadline_and_the_servers_limit_end_it(serve: Serve) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=0))) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.embed("hi", timeout=0.2)
        await closed(serving.engine)
    assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    async with serve(FakeEngine(held(asyncio.Event(), after=0)), max_request_seconds=0.1) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.embed("hi", timeout=60)
    assert failed.value.reason == "DEADLINE_EXCEEDED"


async def test_it_counts_as_a_call_that_is_open(serve: Serve) -> None:
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate, after=0)), max_concurrent_requests=1, admission_wait=0.01) as serving:
        first = asyncio.create_task(serving.client.embed("hi"))
        await serving.engine.stream_number(1)
        async with SlipstreamClient(serving.target, ONCE) as other:
            with pytest.raises(CallFailed) as failed:
                await other.embed("hi")
        assert failed.value.reason == "CONCURRENCY_LIMIT" and failed.value.retry_after
        gate.set()
        assert len(await first) == 1


async def test_a_drain_waits_for_it_or_cuts_it(serve: Serve) -> None:
    for patient in (True, False):
        gate = asyncio.Event()
        # A refusal for good: with retries the client would look for another server, and there is none.
        once = (("grpc.enable_retries", 0),)
        async with (
            serve(FakeEngine(held(gate, after=0))) as serving,
            SlipstreamClient(serving.target, options=once) as client,
        ):
            call = asyncio.create_task(client.embed("hi"))
            await serving.engine.stream_number(1)
            drain = asyncio.create_task(serving.server.drain(0.0, PATIENCE if patient else 0.0))
            if patient:
                await until(lambda: serving.engine.state.value == "draining")
                gate.set()
            assert await drain == (0 if patient else 1)
            if patient:
                assert len(await call) == 1
            else:
                with pytest.raises(CallFailed) as failed:
                    await call
                assert failed.value.reason == "DRAINING"


async def test_what_an_engine_died_of_is_not_tried_on_the_next(serve: Serve) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=0))) as serving:
        call = serving.stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="hi")]))
        await serving.engine.stream_number(1)
        serving.engine.kill(RuntimeError("a step failed"))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(failed.value.trailing_metadata() or ()).get("grpc-retry-pushback-ms") == "-1"


async def test_before_the_model_is_loaded(config: Any) -> None:
    async with listening(Server(config(), lambda *_: FakeEngine())) as server:
        async with SlipstreamClient(f"127.0.0.1:{server.port}") as client:
            with pytest.raises(CallFailed) as failed:
                await client.embed("hi")
    assert (failed.value.code.name, failed.value.reason) == ("UNAVAILABLE", "STARTING")


async def test_one_id_for_one_live_request_of_either_kind(serve: Serve) -> None:
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate, after=0))) as serving:
        call = asyncio.create_task(serving.client.embed("hi", request_id="same"))
        await serving.engine.stream_number(1)
        for again in (serving.client.embed("hi", request_id="same"), serving.client.complete("hi", request_id="same")):
            with pytest.raises(CallFailed) as failed:
                await again
            assert failed.value.code is grpc.StatusCode.ALREADY_EXISTS
        gate.set()
        assert len(await call) == 1


async def test_a_stream_beside_it_goes_on(serve: Serve) -> None:
    def script(request: GenerateRequest) -> Any:
        return [RequestFailed("not finite")] if request.sampling.max_tokens == 1 else held(asyncio.Event(), 1)(request)

    async with serve(FakeEngine(script)) as serving:
        events = serving.client.generate("hi")
        assert isinstance(await anext(events), Chunk)
        with pytest.raises(CallFailed):
            await serving.client.embed("hi")
        assert serving.engine.live_requests == 1
        await events.aclose()


async def test_the_dimension_is_told(serve: Serve) -> None:
    async with serve() as serving:
        assert (await serving.client.model_info()).embedding_dimension == 4
    async with serve(FakeEngine(info=info_with(embedding_dimension=0))) as serving:
        assert not (await serving.client.model_info()).HasField("embedding_dimension")


async def test_the_command_prints_vectors_of_a_server(serve: Serve) -> None:
    async with serve() as serving:

        async def printed(*args: str, typed: str | None = None) -> Result:
            asked = ["embed", "--server", serving.target, *args]
            return await asyncio.to_thread(CliRunner().invoke, cli, asked, input=typed)

        lines = await printed("--pooling", "mean", "--no-normalize", "--adapter", "french", "a", "abc")
        whole = await printed("--json", "--dimensions", "2", "--truncate", "-", typed="a b\nc\n")
        nothing = await printed("-", typed="")
        bad = await printed("a", "")
        embedded = serving.engine.embedded
    assert [json.loads(line) for line in lines.output.splitlines()] == [[1, 0, 0, 0], [3, 1, 0, 0]]
    assert json.loads(whole.output) == {
        "dimension": 2,
        "embeddings": [
            {"values": [3, 0], "prompt_tokens": 3, "cached_tokens": 1},
            {"values": [1, 1], "prompt_tokens": 1, "cached_tokens": 1},
        ],
    }
    assert embedded[0].pooling is Pooling.MEAN and not embedded[0].normalize
    assert [(each.adapter, each.truncate) for each in embedded] == [("french", False), ("", True)]
    assert (nothing.exit_code, len(embedded)) == (2, 2)
    assert bad.exit_code == 1 and "inputs[1].text" in bad.output and "Traceback" not in bad.output


def test_the_command_runs_an_engine_of_its_own(checkpoint: object, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[FakeEngine] = []

    def build(config: object, progress: object) -> FakeEngine:
        engines.append(FakeEngine())
        return engines[0]

    monkeypatch.setattr("service.engine.builder.build_core_engine", build)
    result = CliRunner().invoke(cli, ["embed", "--model", str(checkpoint), "--pooling", "cls", "abc"])
    assert (result.exit_code, json.loads(result.stdout)[0]) == (0, 3)
    assert engines[0].stopped == 1 and engines[0].embedded[0].pooling is Pooling.CLS


def test_the_command_teaches() -> None:
    shown = CliRunner().invoke(cli, ["embed", "--help"]).output
    assert (
        'slipstream embed "' in shown
        and "--pooling [last|mean|cls]" in shown
        and "[default: as the model was trained]" in " ".join(shown.split())
    )
    assert "--page-size" in shown and "--port" not in shown and "--seed" not in shown
    assert "\n  embed " in CliRunner().invoke(cli, ["--help"]).output


def test_defaults_of_the_settings_allow_the_largest_call() -> None:
    assert ServerConfig().engine.scheduler.max_queued_requests >= MAX_EMBED_INPUTS
