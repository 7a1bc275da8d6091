"""Attach: a stream whose connection breaks anywhere, by any hand, brings every token once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from service.client import CallFailed, Chunk, SlipstreamClient, resumed_call
from service.client.resumed_call import Received
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.fakes.breaking_proxy import breaking_proxy
from tests.support.fakes.granted import granted
from tests.support.kept_server import GREEDY, KeptServer, Seen, kept_server, uninterrupted
from tests.support.until import until

PATIENCE = 20.0
PROMPT = [5, 6, 7, 8]


async def begun(client: SlipstreamClient, name: str, tokens: int = 6000, **options: Any) -> tuple[Any, Seen]:
    """A resumable stream that has brought something, read by a raw call that can be dropped like a dead client."""
    sampling = pb.SamplingParams(max_tokens=tokens, **GREEDY, **options)
    request = pb.GenerateRequest(
        request_id=name, token_ids=pb.TokenIds(ids=PROMPT), sampling_params=sampling, resumable=True
    )
    call = client.stub.Generate(request, metadata=client.metadata)
    assert (await call.read()).HasField("started")
    seen = Seen()
    first = (await call.read()).delta
    seen.note(Chunk(name, first.index, first.position, tuple(first.token_ids), first.text))
    return call, seen


async def rest(client: SlipstreamClient, name: str, seen: Seen) -> Seen:
    async with asyncio.timeout(PATIENCE):
        async for event in client.attach(name, seen.received()):
            seen.note(event)
    return seen


async def refusal(client: SlipstreamClient, name: str, received: dict[int, Received] | None = None) -> tuple[str, str]:
    with pytest.raises(CallFailed) as failed:
        async for _ in client.attach(name, received):
            pass
    return failed.value.code.name, failed.value.reason


async def until_gone(server: KeptServer) -> None:
    """No request is live."""
    await until(lambda: not server.engine.live_requests, within=PATIENCE)


async def test_a_connection_that_breaks_anywhere_loses_and_repeats_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut by a proxy after random numbers of bytes, several streams on one connection, resumed by the client itself."""
    # Twelve streams share the bytes of a connection: one of them may get none of them, many times in a row.
    monkeypatch.setattr(resumed_call, "ATTEMPTS", 1_000)
    rng = random.Random(seed)
    print(f"seed {seed}")
    async with kept_server(0.001) as server, server.client() as straight:
        async with breaking_proxy(server.port, lambda: rng.randrange(300, 12_000)) as proxy:
            async with server.client(proxy.target) as client:

                async def one(number: int) -> None:
                    options = {"max_tokens": rng.randrange(200, 900), "n": rng.choice((1, 1, 3)), **GREEDY}
                    options |= {"want_text": bool(rng.getrandbits(1)), "logprobs": not rng.randrange(4)}
                    if options["logprobs"] and rng.getrandbits(1):
                        options["logprob_token_ids"] = [9, 3, 9]
                    prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
                    expected = await uninterrupted(straight, prompt, **options)
                    seen = await uninterrupted(client, prompt, resumable=True, **options)
                    assert seen.outcome == expected.outcome, number

                async with asyncio.timeout(PATIENCE):
                    await asyncio.gather(*(one(number) for number in range(12)))
            assert proxy.broken > 10
        assert server.sample("slipstream_attaches_total", how="attached") > 10
        await until_gone(server)


async def test_any_place_that_a_client_remembers_is_a_place_to_go_on_from(seed: int) -> None:
    """A client that crashes may have kept less than it was told: any prefix of those ids, any of that text."""
    rng = random.Random(seed)
    async with kept_server(0.001) as server, server.client() as client:
        whole = await uninterrupted(client, PROMPT, max_tokens=200, **GREEDY)
        ids, text = whole.ids[0], whole.texts[0]
        for number in range(12):
            name = f"crash-{seed}-{number}"
            call, before = await begun(client, name, 200)
            for _ in range(rng.randrange(20 if number == 0 else 0, 60)):
                response = await call.read()
                if not (response and response.HasField("delta")):
                    break
                delta = response.delta
                before.note(Chunk(name, delta.index, delta.position, tuple(delta.token_ids), delta.text))
            call.cancel()
            told = Seen()
            tokens, chars = rng.randint(0, len(before.ids[0])), rng.randint(0, len(before.texts[0]))
            if number == 0:
                # Its text was kept and its ids were not.
                tokens, chars = 0, len(before.texts[0])
                assert chars > 0
            async for event in client.attach(name, {0: Received(tokens, len(text[:chars].encode()))}):
                if isinstance(event, Chunk):
                    assert event.position == tokens + len(told.ids.setdefault(0, []))
                    told.ids[0] += event.token_ids
                    told.texts[0] = told.texts.get(0, "") + event.text
                else:
                    told.ends[0] = event
            assert (told.ids[0], told.texts[0]) == (ids[tokens:], text[chars:])
            assert told.ends[0].completion_tokens == 200


@pytest.mark.alone
async def test_a_client_that_died_goes_on_from_a_new_process() -> None:
    async with kept_server() as server, server.client() as fresh:
        dying = server.client()
        _, seen = await begun(dying, "mine", 300)
        await dying.close()
        assert server.engine.live_requests == 1, "it goes on without a reader"
        with granted("the stream goes on from there"):
            assert len((await rest(fresh, "mine", seen)).ids[0]) == 300
        again = await rest(fresh, "mine", Seen())
        assert again.outcome == seen.outcome, "kept for a while after its end too"


@pytest.mark.alone
async def test_the_second_reader_takes_the_stream_from_the_first() -> None:
    async with kept_server() as server, server.client() as client, server.client() as other:
        call, seen = await begun(client, "mine", 500)
        (task,) = [asyncio.create_task(rest(other, "mine", Seen()))]
        while (response := await _read(call)) is not None and not isinstance(response, str):
            seen.note(Chunk("mine", 0, response.delta.position, tuple(response.delta.token_ids), response.delta.text))
        assert response == "STREAM_TAKEN_OVER"
        whole = await task
        assert len(whole.ids[0]) == 500 and whole.ids[0][: len(seen.ids[0])] == seen.ids[0]


async def _read(call: Any) -> Any:
    import grpc.aio

    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        return CallFailed(error).reason


@pytest.mark.alone
async def test_many_at_once_leave_one_reader_with_everything() -> None:
    async with kept_server() as server, server.client() as client:
        call, _ = await begun(client, "mine", 600)
        found = await asyncio.gather(*(rest(client, "mine", Seen()) for _ in range(8)), return_exceptions=True)
        call.cancel()
        whole = [each for each in found if isinstance(each, Seen)]
        lost = [each.reason for each in found if isinstance(each, CallFailed)]
        assert (len(whole), lost) == (1, ["STREAM_TAKEN_OVER"] * 7)
        assert len(whole[0].ids[0]) == 600


async def test_the_same_request_sent_again_is_the_same_stream_and_another_is_refused() -> None:
    async with kept_server() as server, server.client() as client:
        call, _ = await begun(client, "mine", 200)
        call.cancel()
        options = {"request_id": "mine", "resumable": True, **GREEDY}
        # Sent again by another process, it belongs to another trace.
        client.metadata = (("traceparent", f"00-{'4b' * 16}-{'f0' * 8}-01"),)
        with granted("it is the same request"):
            whole = await uninterrupted(client, PROMPT, max_tokens=200, **options)
        assert len(whole.ids[0]) == 200
        with pytest.raises(CallFailed) as refused:
            await uninterrupted(client, PROMPT, max_tokens=201, **options)
        assert (refused.value.code.name, refused.value.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")
        assert server.engine.stats.generation_tokens <= 202, "generated once"


async def test_the_id_of_a_stream_that_is_over_and_kept_is_free_for_a_request_that_is_not_resumable() -> None:
    async with kept_server() as server, server.client() as client:
        kept = await uninterrupted(client, PROMPT, max_tokens=20, request_id="mine", resumable=True, **GREEDY)
        with granted("no live request has the id"):
            plain = await uninterrupted(client, PROMPT, max_tokens=30, request_id="mine", **GREEDY)
        assert len(plain.ids[0]) == 30
        assert (await rest(client, "mine", Seen())).outcome == kept.outcome, "it is kept all the same"


@pytest.mark.alone
async def test_nobody_comes_in_time() -> None:
    async with kept_server(resume_seconds=0.2) as server, server.client() as client:
        call, seen = await begun(client, "mine")
        call.cancel()
        await until_gone(server)
        assert await refusal(client, "mine", seen.received()) == ("NOT_FOUND", "STREAM_EXPIRED")
        assert server.sample("slipstream_kept_streams") == server.sample("slipstream_kept_stream_bytes") == 0
        assert server.sample("slipstream_kept_streams_gone_total", how="expired") == 1


async def test_an_unread_stream_runs_to_its_bound_and_then_ends_as_that_of_a_slow_reader() -> None:
    async with kept_server(0.0005, max_pending_tokens=64) as server, server.client() as client:
        call, seen = await begun(client, "mine")
        call.cancel()
        await until_gone(server)
        with pytest.raises(CallFailed) as failed:
            await rest(client, "mine", seen)
        assert failed.value.reason == "SLOW_CONSUMER"
        assert len(seen.ids[0]) > 64 and await refusal(client, "mine", seen.received()) == (
            "RESOURCE_EXHAUSTED",
            "SLOW_CONSUMER",
        )


@pytest.mark.alone
async def test_abort_ends_a_stream_that_has_no_reader() -> None:
    async with kept_server() as server, server.client() as client:
        call, seen = await begun(client, "mine")
        call.cancel()
        assert await client.abort("mine")
        await until_gone(server)
        assert (await rest(client, "mine", seen)).ends[0].reason == "cancelled"


async def test_the_clients_own_loop_left_early_ends_the_request() -> None:
    async with kept_server() as server, server.client() as client:
        events = client.generate(PROMPT, max_tokens=6000, resumable=True, **GREEDY)
        assert isinstance(await anext(events), Chunk)
        await events.aclose()
        await until_gone(server)


async def test_what_cannot_be_attached_to_says_why() -> None:
    async with kept_server() as server, server.client() as client:
        assert await refusal(client, "never") == ("NOT_FOUND", "STREAM_NOT_FOUND")
        await client.complete(PROMPT, request_id="plain", max_tokens=4, **GREEDY)
        assert await refusal(client, "plain") == ("NOT_FOUND", "STREAM_NOT_FOUND")
        call, _ = await begun(client, "mine", 20)
        for place in (Received(10_000), Received(0, 100_000), Received(1, 0, True)):
            assert await refusal(client, "mine", {0: place}) == ("OUT_OF_RANGE", "POSITION_AHEAD")
        for bad in ({1: Received()}, {0: Received(-1)}, {0: Received(0, -1)}):
            assert (await refusal(client, "mine", bad))[0] == "INVALID_ARGUMENT"
        call.cancel()
    async with kept_server(resume_seconds=0) as server, server.client() as client:
        with pytest.raises(CallFailed) as off:
            await uninterrupted(client, PROMPT, max_tokens=2, resumable=True)
        assert (off.value.code.name, off.value.reason) == ("FAILED_PRECONDITION", "RESUME_OFF")
        assert await refusal(client, "never") == ("FAILED_PRECONDITION", "RESUME_OFF")


@pytest.mark.alone
async def test_a_slow_writer_loses_its_call_and_not_its_request() -> None:
    """A connection that stalls looks like a client that does not read; it may come back."""
    from tests.contract.api.raw_http2 import DeafClient

    sampling = pb.SamplingParams(max_tokens=300, **GREEDY)
    request = pb.GenerateRequest(
        request_id="mine", token_ids=pb.TokenIds(ids=PROMPT), sampling_params=sampling, resumable=True
    )
    async with kept_server(write_timeout=0.2) as server, server.client() as client:
        deaf = await DeafClient.connect(server.port, 0, answers_pings=True)
        await deaf.call("/slipstream.v1.InferenceService/Generate", request.SerializeToString())
        await until(lambda: server.sample("slipstream_slow_consumer_evictions_total") == 1, within=PATIENCE)
        assert len((await rest(client, "mine", Seen())).ids[0]) == 300
        await deaf.close()
