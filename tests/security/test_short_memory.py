"""Above nine tenths of the container's memory no call is read or admitted; what runs goes on and health is SERVING."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core import machine
from service.client import CallFailed, SlipstreamClient
from service.limits import memory_gate
from service.limits.memory_gate import LOOK_SECONDS, STILL_ANSWERED, TRIM_SECONDS, MemoryWatch
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.chaos.process import PATIENCE, ServerProcess
from tests.security.half_sender import HalfSender
from tests.support.fakes.hand_clock import by_hand
from tests.support.kept_server import GREEDY, Seen, kept_server
from tests.support.until import until
from tests.system.test_attach import begun, rest

SERVICE = "slipstream.v1.InferenceService"
MIB = 1 << 20
LIMIT = 512 * MIB
OWN_GROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many of 1,000 MiB the container has in use."""
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OF_THIS_PROCESS", tmp_path / "of")
    monkeypatch.setattr(machine, "OF_THE_MACHINE", tmp_path / "none")
    (tmp_path / "of").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(f"{1000 * MIB}\n")

    def write(count: int) -> None:
        # At once: the watch looks from a thread of its own.
        (tmp_path / "next").write_text(f"{count * MIB}\n")
        (tmp_path / "next").rename(tmp_path / "memory.current")

    write(500)
    return write


async def refusal(client: SlipstreamClient) -> CallFailed:
    with pytest.raises(CallFailed) as refused:
        await client.complete([3], max_tokens=2, **GREEDY)
    return refused.value


async def test_new_work_is_refused_and_the_rest_goes_on(used: Any) -> None:
    async with kept_server(step_seconds=0.01) as server, server.client() as client:
        running, kept = client.generate([3], max_tokens=600, **GREEDY), await begun(client, "kept", 100)
        await anext(running)
        used(901)
        await until(lambda: server.server._memory.short)
        failed = await refusal(client)
        assert (failed.code.name, failed.reason) == ("RESOURCE_EXHAUSTED", "MEMORY") and failed.retry_after
        with pytest.raises(CallFailed, match="memory"):
            await client.tokenize("27")
        stub = health_pb2_grpc.HealthStub(client.channel)
        for service in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await client.stub.GetLoad(pb.GetLoadRequest())).live_requests >= 1
        kept[0].cancel()
        try:
            seen = await rest(client, "kept", Seen())
        except CallFailed as refused:
            pytest.fail(f"a stream that is kept goes on: {refused}")
        assert len(seen.ids[0]) == 100
        assert sum([len(chunk.token_ids) async for chunk in running if hasattr(chunk, "token_ids")]) > 590
        assert server.sample("slipstream_requests_rejected_total", reason="MEMORY") >= 1
        assert server.sample("slipstream_calls_turned_away_total", kind="text", reason="MEMORY") >= 1
        assert server.sample("slipstream_memory_used_ratio") == pytest.approx(0.901)
        used(900)
        await until(lambda: not server.server._memory.short)
        await client.complete([3], max_tokens=2, **GREEDY)


async def test_a_refused_call_is_not_read(used: Any) -> None:
    """Its message never ends, and it ends all the same."""
    async with kept_server() as server:
        used(950)
        await until(lambda: server.server._memory.short)
        sender = await HalfSender.connect(server.port, "127.0.0.9")
        for _ in range(64):
            sender.begin(f"/{SERVICE}/Tokenize", 4 * MIB)
        async with asyncio.timeout(PATIENCE):
            await sender.until_ended(64)
        assert sender.sent < 64 * 128 * 1024, "of each no more than windows"
        await sender.close()


async def test_methods_that_take_memory_are_not_among_those_still_answered(used: Any) -> None:
    """Refused unless named; what is named exists."""
    async with kept_server() as server, server.client() as client:
        used(950)
        await until(lambda: server.server._memory.short)
        for method in pb.DESCRIPTOR.services_by_name["InferenceService"].methods:
            call: Any = client.channel.unary_stream(f"/{SERVICE}/{method.name}")(b"")
            with suppress(grpc.aio.AioRpcError):
                await call.read()
            refused = "short of memory" in str(await call.details())
            assert refused is (method.name not in STILL_ANSWERED), method.name


def test_the_allocator_is_asked_now_and_then_and_not_at_each_look(used: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through all that it keeps, and every thread that frees or takes memory waits for it."""
    clock, asked = by_hand(monkeypatch, memory_gate), list[float]()
    monkeypatch.setattr(memory_gate, "give_back_memory", lambda: asked.append(clock.now))
    watch, began = MemoryWatch(), clock.now
    watch.look()
    assert not asked, "there is memory"
    used(950)
    for _ in range(round(2 * TRIM_SECONDS / LOOK_SECONDS)):
        watch.look()
        clock.work(LOOK_SECONDS)
    assert asked == [began, began + TRIM_SECONDS + LOOK_SECONDS]


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 512 MiB below the one that the tests run in, where that can be had."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"), None)
    made = OWN_GROUP / (path or "/").lstrip("/") / f"slipstream-{os.getpid()}"
    try:
        made.mkdir()
    except OSError:
        pytest.skip("no control group of memory can be made here")
    try:
        (made / "memory.limit_in_bytes").write_text(str(LIMIT))
        yield made
    finally:
        made.rmdir()


FILLER = (
    "import sys; sys.stdin.readline(); held = bytearray(int(sys.argv[1])); print('full', flush=True); sys.stdin.read()"
)


def started_filler(size: int) -> subprocess.Popen[str]:
    """A process that takes `size` bytes once it is sent a line, and ends with its input."""
    return subprocess.Popen(
        [sys.executable, "-c", FILLER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.alone
async def test_a_real_control_group(group: Path) -> None:
    """Another process of the container fills it up, and ends."""
    process = ServerProcess()
    filler = started_filler(LIMIT // 100 * 94)
    assert filler.stdin is not None and filler.stdout is not None
    try:
        process.wait_ready()
        for pid in (process.pid, filler.pid):
            (group / "cgroup.procs").write_text(str(pid))
        async with process.client() as client:
            await client.complete([3], max_tokens=2, **GREEDY)
            print("fill", file=filler.stdin, flush=True)
            assert await asyncio.to_thread(filler.stdout.readline) == "full\n"
            assert (await answered(client, "MEMORY")).retry_after
            filler.stdin.close()
            filler.wait()
            assert await answered(client, "") is None
        assert process.process.poll() is None
    finally:
        filler.kill()
        process.close()
        filler.wait()
        filler.stdout.close()


async def answered(client: SlipstreamClient, reason: str) -> Any:
    """Ask until a request ends for `reason`, none meaning that it is served: the watch looks every quarter second."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await client.complete([3], max_tokens=2, **GREEDY)
                failed = None
            except CallFailed as error:
                failed = error
            if reason == ("" if failed is None else failed.reason):
                return failed
            await asyncio.sleep(0.02)
