"""What health watchers and new callers notice of a server that goes away, with the time of each change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.client import CallFailed, SlipstreamClient
from service.servicers.health import LIVENESS, READINESS

NAMES: dict[int, str] = {value: name for name, value in health_pb2.HealthCheckResponse.ServingStatus.items()}


class Diary:
    """Entries (seconds since its start, who, what) in order."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.entries: list[tuple[float, str, str]] = []
        self._changed = asyncio.Event()

    def write(self, who: str, what: str) -> None:
        """One entry."""
        self.entries.append((time.monotonic() - self.began, who, what))
        self._changed.set()

    async def wait_for(self, who: str, what: str, within: float) -> None:
        """Until that entry is there."""
        async with asyncio.timeout(within):
            while self.first(who, what) is None:
                self._changed.clear()
                await self._changed.wait()

    def first(self, who: str, what: str) -> float | None:
        """When `who` first noticed `what`; None for never."""
        return next((at for at, *entry in self.entries if entry == [who, what]), None)

    def of(self, who: str) -> list[str]:
        """All that `who` noticed, in order."""
        return [what for _, name, what in self.entries if name == who]


def health(channel: grpc.aio.Channel) -> Any:
    """A stub of grpc.health.v1."""
    return health_pb2_grpc.HealthStub(channel)


async def _watch(channel: grpc.aio.Channel, service: str, who: str, diary: Diary) -> None:
    try:
        async for answer in health(channel).Watch(health_pb2.HealthCheckRequest(service=service)):
            diary.write(who, NAMES[answer.status])
    except grpc.aio.AioRpcError as error:
        diary.write(who, f"ended {error.code().name} {CallFailed(error).reason}".strip())


@asynccontextmanager
async def watched(client: SlipstreamClient, diary: Diary) -> AsyncIterator[Diary]:
    """Watches readiness and liveness, from the first answers on; ends with the server's end of the watches."""
    tasks = [
        asyncio.create_task(_watch(client.channel, service, who, diary))
        for service, who in ((READINESS, "readiness"), (LIVENESS, "liveness"))
    ]
    await diary.wait_for("readiness", "SERVING", 10.0)
    await diary.wait_for("liveness", "SERVING", 10.0)
    diary.began, diary.entries = time.monotonic(), []
    try:
        yield diary
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def knock(client: SlipstreamClient, diary: Diary) -> None:
    """Ask for one token again and again until the server is gone; write down what answers."""
    while True:
        try:
            await client.complete([1, 2], max_tokens=1, ignore_eos=True, want_text=False)
            diary.write("caller", "OK")
        except CallFailed as failed:
            diary.write("caller", failed.reason or f"transport {failed.code.name}")
            if not failed.reason:
                return
