"""Attach over front ends: the engine's process keeps the stream, so it outlives the front end that began it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from service.client import CallFailed
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.kept_server import GREEDY, Seen
from tests.support.until import until
from tests.system.test_attach import PROMPT, begun, refusal, rest
from tests.system.test_frontend_doors import ALICE, BOB, PATIENCE, group


async def test_a_stream_outlives_its_front_end_and_goes_on_through_another() -> None:
    async with group() as server, server.places() as clients:
        (dying, one), (_, other) = clients.items()
        call, seen = await begun(one, "mine", 1500)
        os.kill(dying, signal.SIGKILL)
        while (response := await _next(call)) is not None:
            seen.ids[0] += response.delta.token_ids
            seen.texts[0] += response.delta.text
        await until(lambda: server.engine.live_requests == 1, within=PATIENCE)
        assert len((await rest(other, "mine", seen)).ids[0]) == 1500
        again = await rest(other, "mine", Seen())
        assert again.outcome == seen.outcome
        await until(lambda: not server.engine.live_requests, within=PATIENCE)
        await server.counted('slipstream_attaches_total{how="attached"}', 2)


async def _next(call: object) -> pb.GenerateResponse | None:
    import grpc.aio

    try:
        response = await call.read()  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return None
    assert isinstance(response, pb.GenerateResponse)
    return response


async def test_a_stream_is_taken_over_from_one_front_end_by_another_and_belongs_to_its_tenant(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    async with group(auth_token_file=str(tokens)) as server:
        async with server.places(ALICE) as hers, server.places(BOB) as his:
            one, other = hers.values()
            call, _ = await begun(one, "mine", 600)
            for client in his.values():
                assert await refusal(client, "mine") == ("NOT_FOUND", "STREAM_NOT_FOUND")
                assert not await client.abort("mine")
            task = asyncio.create_task(rest(other, "mine", Seen()))
            assert await _refused(call) == "STREAM_TAKEN_OVER"
            assert len((await task).ids[0]) == 600
            stream = next(iter(his.values()))
            assert len((await stream.complete(PROMPT, request_id="mine", max_tokens=3, **GREEDY))[0].token_ids) == 3


async def _refused(call: object) -> str:
    import grpc.aio

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async with asyncio.timeout(PATIENCE):
            while await call.read():  # type: ignore[attr-defined]
                pass
    return CallFailed(failed.value).reason


async def test_limits_of_a_tenant_are_one_for_all_front_ends_and_freed_with_the_front_end(tmp_path: Path) -> None:
    tokens, limits = tmp_path / "tokens", tmp_path / "tenants"
    tokens.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    limits.write_text("alice: {concurrent_requests: 2}\n")
    settings = {"auth_token_file": str(tokens), "tenants_file": str(limits), "admission_wait": 0.05}
    async with group(**settings) as server:
        async with server.places(ALICE) as hers, server.places(BOB) as his:
            (dying, one), (_, other) = hers.items()
            held = [(await begun(client, name))[0] for client, name in ((one, "a"), (other, "b"))]
            for client in hers.values():
                with pytest.raises(CallFailed) as refused:
                    await client.complete(PROMPT, max_tokens=2, **GREEDY)
                assert (refused.value.code.name, refused.value.reason) == (
                    "RESOURCE_EXHAUSTED",
                    "TENANT_CONCURRENCY_LIMIT",
                )
                assert refused.value.retry_after and "2 requests at once" in refused.value.message
            for client in his.values():
                await client.complete(PROMPT, max_tokens=2, **GREEDY)
            series = 'slipstream_tenant_refusals_total{reason="TENANT_CONCURRENCY_LIMIT",tenant="alice"}'
            # Each is tried twice, by the published policy.
            await server.counted(series, 4)
            # What goes on without a reader still counts; what is over does not.
            held[0].cancel()
            with pytest.raises(CallFailed):
                await one.complete(PROMPT, max_tokens=2, **GREEDY)
            assert await other.abort("a") and await other.abort("b")
            await until(lambda: not server.engine.live_requests, within=PATIENCE)
            plain = [one.generate(PROMPT, max_tokens=6000, **GREEDY) for _ in range(2)]
            for stream in plain:
                await anext(stream)
            os.kill(dying, signal.SIGKILL)
            for stream in plain:
                with pytest.raises(CallFailed):
                    async for _ in stream:
                        pass
            await other.complete(PROMPT, max_tokens=2, **GREEDY)
