"""Workers as an operator runs them, restarted one after the other while clients go on calling.

What stands between the clients and the workers is a `FrontDoor`: here a gRPC client with a service config; that of
`tests.contract.gateway.smg_door` is a gateway.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from service.client import CallFailed, Chunk, SlipstreamClient
from tests.support.fork_server import ForkedProcess, fork_server
from tests.support.ports import free_port

READY = re.compile(r"serving \S+ on \S+, metrics on \S+")
PATIENCE = 90.0
"""Seconds in which a worker starts, or drains and ends."""

GRACE = 10.0


class Serving(Protocol):
    """A worker, as far as a front door knows it."""

    @property
    def target(self) -> str:
        """Where it serves, host:port."""
        ...


class Worker:
    """`python -m service serve` of the bundled model, always on the same port; forked, so that it starts quickly."""

    def __init__(self, linger: float, *flags: str) -> None:
        self.port = free_port()
        self._linger, self._flags = linger, flags
        self._process: ForkedProcess | None = None

    @property
    def target(self) -> str:
        """Where it serves."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        own = {"port": self.port, "metrics-port": 0, "drain-linger": self._linger, "drain-grace": GRACE}
        flags = ["--native=off", *(f"--{name}={value}" for name, value in own.items())]
        arguments = ["serve", "--cpu-threads=1", "--log-level=error", *flags, *self._flags]
        process = fork_server().start("service", arguments, os.environ | {"OMP_NUM_THREADS": "1"})
        self._process = process
        async with asyncio.timeout(PATIENCE):
            line = await asyncio.to_thread(process.stdout.readline)
        assert READY.search(line), line or process.stderr.read()

    async def restart(self) -> int:
        """Drain it as an orchestrator does, and start another one in its place; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = await self._ended(self._process)
        await self.start()
        return code

    async def kill(self) -> None:
        """End it at once, if it is there."""
        if self._process is not None:
            self._process.kill()
            await self._ended(self._process)

    async def _ended(self, process: ForkedProcess) -> int:
        code = await asyncio.to_thread(process.wait, PATIENCE)
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
        return code


class FrontDoor(Protocol):
    """What clients call, and what a rollout must know of it. `close` is called once."""

    linger: float
    """Seconds in which it notices that a worker drains."""
    min_ready: float
    """Seconds in which it notices that a new worker is ready: the next one must not go before, as Kubernetes knows it
    by `minReadySeconds`."""

    async def settle(self) -> None:
        """Wait until all workers get calls, as far as somebody outside can see that."""
        ...

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[int]:
        """Numbers of tokens as they come; raises `Refused`."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...


class Refused(Exception):
    """A call failed for its client; `what` is the status in a word."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class GrpcDoor:
    """One gRPC channel to all workers, with the service config that `docs/reference/client.md` publishes for fleets."""

    linger, min_ready = 1.0, 0.0

    def __init__(self, workers: Sequence[Worker], _folder: Path) -> None:
        own = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
        )
        self._client = SlipstreamClient("ipv4:" + ",".join(worker.target for worker in workers), own, fleet=True)

    async def settle(self) -> None:
        """See `FrontDoor`. It watches their readiness, so there is nothing to wait for."""

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[int]:
        """See `FrontDoor`."""
        try:
            async for event in self._client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
                if isinstance(event, Chunk):
                    yield len(event.token_ids)
        except CallFailed as failed:
            raise Refused(f"{failed.code.name} {failed.reason}".strip()) from None

    async def close(self) -> None:
        """See `FrontDoor`."""
        await self._client.close()


class Load:
    """Clients that call on, `pause` seconds after each call.

    `seen` counts how the calls ended, failures by whether a token had come.
    """

    def __init__(self, door: FrontDoor, clients: int, pause: float = 0.0) -> None:
        self._door, self._pause, self._over = door, pause, False
        self.seen: Counter[str] = Counter()
        self.slowest = 0.0
        self._tasks = [asyncio.create_task(self._call_on(number)) for number in range(clients)]

    async def _call_on(self, number: int) -> None:
        while not self._over:
            # Short and long ones, so that some are open whenever a worker goes.
            tokens, came, began = (24, 160)[number % 2], 0, time.monotonic()
            try:
                async for count in self._door.stream(f"{number}+1=", tokens):
                    if not came:
                        self.slowest = max(self.slowest, time.monotonic() - began)
                    came += count
            except Refused as refused:
                self.seen[f"{'after' if came else 'before'} the first token: {refused.what}"] += 1
                continue
            self.seen["whole" if came == tokens else "short"] += 1
            await asyncio.sleep(self._pause)

    async def more(self, calls: int) -> None:
        """Wait until so many more calls were whole."""
        enough = self.seen["whole"] + calls
        async with asyncio.timeout(PATIENCE):
            while self.seen["whole"] < enough:
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Let the calls that are open end."""
        self._over = True
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def fleet(linger: float, *flags: str) -> AsyncIterator[list[Worker]]:
    """Two workers that serve; killed at the end."""
    workers = [Worker(linger, *flags) for _ in range(2)]
    async with AsyncExitStack() as held:
        for worker in workers:
            held.push_async_callback(worker.kill)
        await asyncio.gather(*(worker.start() for worker in workers))
        yield workers
