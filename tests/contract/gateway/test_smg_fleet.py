"""Two workers behind one real gateway: who leaves frees everything, prefixes are found again, a death is survived."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from smg_grpc_proto.generated.common_pb2 import SubscribeKvEventsRequest
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from service.client import SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.chaos.device import Faults
from tests.chaos.process import PATIENCE, Inside, ServerProcess, settled
from tests.contract.gateway.smg import Smg, needs_smg

pytestmark = [pytest.mark.tools, needs_smg]

MODEL = "fleet"
LONG = 4000
"""Tokens of an output that nobody waits for: twenty seconds."""


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ServerProcess]]:
    settings: dict[str, Any] = {"max_running_requests": 8, "max_total_tokens": 64 * 1024, "max_queued_requests": 4}
    started = [
        ServerProcess(Faults(step_seconds=0.005), served_model_name=MODEL, unnamed_callers="watch", **settings)
        for _ in range(2)
    ]
    try:
        yield [each.wait_ready() for each in started]
    finally:
        for each in started:
            each.close()


@pytest.fixture(scope="module")
def smg(workers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smg]:
    started = Smg(
        tmp_path_factory.mktemp("smg"),
        *(each.target for each in workers),
        policy="cache_aware",
        health_check_interval_secs=1,
        health_failure_threshold=1,
        cb_failure_threshold=1000,
    )
    try:
        yield started.wait_ready(len(workers))
    finally:
        started.close()


def chat(words: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat that takes long."""
    turns = [{"role": "user", "content": words}]
    return {"model": MODEL, "messages": turns, "max_tokens": LONG, "ignore_eos": True, "temperature": 0.0, **fields}


async def running(workers: list[ServerProcess], count: int) -> list[Inside]:
    """Wait until so many sequences run, all workers together."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = [await each.probe() for each in workers if each.process.poll() is None]
            if sum(each.running for each in found) == count:
                return found
            await asyncio.sleep(0.01)


async def test_the_tokenizer_came_as_a_zip(workers: list[ServerProcess], smg: Smg) -> None:
    name = 'slipstream_rpc_handled_total{code="OK",method="sglang.grpc.scheduler.SglangScheduler/GetTokenizer"}'
    fetched = [(await each.metrics()).get(name, 0.0) for each in workers]
    assert sum(fetched) >= 1
    assert smg.post("/v1/chat/completions", **chat(max_tokens=3))[1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("n", [1, 3])
async def test_who_leaves_a_stream_frees_its_rows(workers: list[ServerProcess], smg: Smg, n: int) -> None:
    """The gateway tells of it by Abort; the call itself stays open."""
    before = await cancelled(workers)
    events = smg.events("/v1/chat/completions", **chat(n=n))
    for _ in range(6):
        next(events)
    await running(workers, n)
    events.close()
    for each in workers:
        await settled(each)
    assert await cancelled(workers) == before + n, "none ran to its end"


async def test_who_leaves_before_the_answer_frees_its_rows(workers: list[ServerProcess], smg: Smg) -> None:
    """Without a stream there is no Abort: the call is reset."""
    before = await cancelled(workers)
    waiting = asyncio.create_task(
        asyncio.to_thread(leave_when, smg, left := asyncio.Event(), asyncio.get_running_loop())
    )
    await running(workers, 1)
    left.set()
    await waiting
    for each in workers:
        await settled(each)
    assert await cancelled(workers) == before + 1, "it did not run to its end"


async def cancelled(workers: list[ServerProcess]) -> float:
    """Sequences that all workers together have ended because their client left."""
    name = 'slipstream_requests_finished_total{reason="cancelled"}'
    return sum([(await each.metrics()).get(name, 0.0) for each in workers])


def leave_when(smg: Smg, left: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Ask for a whole answer and close the connection instead of reading it."""
    connection = smg.begin("POST", "/v1/chat/completions", chat())
    asyncio.run_coroutine_threadsafe(left.wait(), loop).result(PATIENCE)
    connection.close()


async def test_a_full_queue_is_too_many_requests(workers: list[ServerProcess], smg: Smg) -> None:
    status, body = await asyncio.to_thread(smg.post, "/v1/chat/completions", **chat(n=9, max_tokens=4))
    assert status == 429 and "the waiting queue is full" in body["error"]["message"], body


async def test_prompts_are_sent_to_the_worker_that_holds_their_prefix(workers: list[ServerProcess], smg: Smg) -> None:
    """The worker got it from elsewhere, so the gateway can know of it from the worker's events only.

    It reads them in its own time, so one miss in ten is let pass; a gateway that knew nothing would miss half.
    """
    hits = 0
    for number in range(10):
        words = f"{number} apples, " * 60
        async with workers[number % 2].client() as client:
            stub = SglangSchedulerStub(client.channel)
            events = stub.SubscribeKvEvents(SubscribeKvEventsRequest())
            while (state := (await events.read()).snapshot).index + 1 < state.count:
                pass
            plain = await tokens(client, words)
            await client.complete(plain, max_tokens=1, temperature=0.0)
            seen = 0
            while seen < len(plain) // 16:
                seen += sum(len(each.stored.blocks) for each in (await events.read()).events)
            events.cancel()
        asked = {"model": MODEL, "prompt": words, "max_tokens": 2, "temperature": 0.0}
        usage = (await asyncio.to_thread(smg.post, "/v1/completions", **asked))[1]["usage"]
        assert usage["prompt_tokens"] == len(plain)
        hits += usage["prompt_tokens_details"]["cached_tokens"] >= len(plain) - 32
    assert hits >= 9


async def tokens(client: SlipstreamClient, words: str) -> list[int]:
    """Ids as the gateway makes them: it puts nothing before a plain prompt."""
    return list((await client.stub.Tokenize(pb.TokenizeRequest(text=words, add_special_tokens=False))).token_ids)


async def test_a_killed_worker_ends_its_streams_and_the_other_goes_on(workers: list[ServerProcess], smg: Smg) -> None:
    """Last: it takes a worker away."""
    events = smg.events("/v1/chat/completions", **chat())
    for _ in range(6):
        next(events)
    found = await running(workers, 1)
    victim, other = sorted(workers, key=lambda each: -found[workers.index(each)].running)
    victim.send(signal.SIGKILL)
    rest = await asyncio.to_thread(list, events)
    assert rest[-1]["error"]["type"] == "stream_error"
    for _ in range(6):
        status, body = await asyncio.to_thread(smg.post, "/v1/chat/completions", **chat(max_tokens=3))
        assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    await asyncio.to_thread(smg.wait, lambda: sum(each["is_healthy"] for each in smg.workers()) == 1)
    await settled(other)
