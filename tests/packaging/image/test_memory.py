"""The kernel ends a worker at its memory limit: it comes back, and what its clients were told was true."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc
import pytest

from service.client import CallFailed, Chunk, End, SlipstreamClient
from tests.packaging.image.conftest import Played
from tests.packaging.image.podman import Podman
from tests.packaging.image.worker import PlayedWorker
from tests.support.until import until
from tests.support.within import within

pytestmark = pytest.mark.soak

TOKENS = 1500
STREAMS = 4
LIMIT = {"resources": {"requests": {"memory": "512Mi"}, "limits": {"memory": "700Mi"}}}
KILLED = 137
"""What tini ends with when its child was killed (128 and SIGKILL)."""

# What is written there is the container's memory, and the kernel can free none of it.
FILL = "dd if=/dev/zero of=/dev/shm/filled bs=1M count=2000"


@dataclass
class Told:
    """What one client was told of its stream."""

    tokens: list[int] = field(default_factory=list)
    ended: str | None = None
    failed: CallFailed | None = None


async def follow(client: SlipstreamClient, number: int, told: Told, tokens: int = TOKENS) -> None:
    try:
        async for each in client.generate(f"{number}+7=", max_tokens=tokens, temperature=0.0, ignore_eos=True):
            if isinstance(each, Chunk):
                told.tokens += each.token_ids
            elif isinstance(each, End):
                told.ended = each.reason
    except CallFailed as failed:
        told.failed = failed


async def followed(worker: PlayedWorker, until_broken: bool) -> list[Told]:
    """Streams of as many clients; `until_broken`: the container's memory is filled once each has some tokens."""
    told = [Told() for _ in range(STREAMS)]
    async with SlipstreamClient(worker.target) as client:
        streams = [asyncio.create_task(follow(client, number, each)) for number, each in enumerate(told)]
        if until_broken:
            await until(lambda: all(len(each.tokens) > 20 for each in told), within=60)
            await asyncio.to_thread(worker.run, "sh", "-c", FILL)
        await asyncio.gather(*streams)
    return told


def exit_codes(podman: Podman, worker: PlayedWorker) -> list[int]:
    """With what its containers ended, in order."""
    number = podman.inspect("container", worker.container)["Id"]
    asked = ("--filter", f"container={number}", "--filter", "event=died", "--format", "{{.ContainerExitCode}}")
    return [int(each) for each in podman.ok("events", "--stream=false", *asked).split()]


@pytest.mark.timeout(600)
async def test_it_comes_back_and_nothing_that_was_told_was_wrong(played: Played, podman: Podman) -> None:
    worker = await asyncio.to_thread(played(LIMIT).start)
    broken = await followed(worker, until_broken=True)
    for each in broken:
        assert each.ended is None, "a stream of a killed worker has no end that was told"
        assert each.failed is not None and each.failed.code is grpc.StatusCode.UNAVAILABLE
    await asyncio.to_thread(worker.wait, lambda: worker.state["RestartCount"] == 1)
    assert exit_codes(podman, worker) == [KILLED]
    (worker.place("shm") / "filled").unlink()
    await asyncio.to_thread(worker.wait, lambda: worker.probe("startup"))
    whole = await followed(worker, until_broken=False)
    for before, after in zip(broken, whole, strict=True):
        assert (after.ended, len(after.tokens), after.failed) == ("length", TOKENS, None)
        assert after.tokens[: len(before.tokens)] == before.tokens
    assert await asyncio.to_thread(worker.stop) == 0


async def test_calls_are_refused_before_the_limit_is_reached(played: Played) -> None:
    """The gate reads the limit of the container, from inside it."""
    worker = await asyncio.to_thread(played(LIMIT).start)
    async with SlipstreamClient(worker.target) as client:
        told = Told()
        for mebibytes in range(0, 700, 10):
            await asyncio.to_thread(worker.run, "dd", "if=/dev/zero", f"of=/dev/shm/{mebibytes}", "bs=1M", "count=10")
            told = Told()
            await follow(client, 1, told, tokens=2)
            if told.failed is not None:
                break
        assert told.failed is not None and told.failed.reason == "MEMORY"
        assert worker.probe("liveness") and worker.probe("readiness")
        for each in worker.place("shm").iterdir():
            each.unlink()
        async with within(30, "memory that is given back opens the gate"):
            while told.failed is not None:
                told = Told()
                await follow(client, 1, told, tokens=2)
    assert worker.state["RestartCount"] == 0


async def test_too_little_memory_ends_with_the_code_of_a_kill(played: Played, podman: Podman) -> None:
    """A process that is killed prints nothing: the code and the restarts tell."""
    worker = played({"resources": {"requests": {"memory": "64Mi"}, "limits": {"memory": "100Mi"}}})
    await asyncio.to_thread(worker.play)
    await asyncio.to_thread(worker.wait, lambda: worker.state["RestartCount"] >= 2)
    assert set(exit_codes(podman, worker)) == {KILLED}
    assert not worker.probe("liveness")
