"""Servers of both roles behind the real gateway, streams through them, and what they hold in the end."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.process import ServerProcess
from tests.contract.gateway.smg import Smg
from tests.contract.gateway.smg_pairs import pairing

MODEL = "slipstream-bundled"
WORDS = "once upon a time there was a little girl named Mia who loved to play in the garden with her dog".split()
TRANSFER_TIMEOUT = 2
"""Seconds after which a server gives up keys that do not come."""
PATIENCE = 30.0
"""Seconds after which something that should have happened counts as missing."""
PAUSE = 0.02
FLAGS: dict[str, Any] = {
    "health_check_interval_secs": 1,
    "health_check_timeout_secs": 2,
    "health_failure_threshold": 2,
    "disable_circuit_breaker": True,
    "worker_wedge_secs": 120,
}
"""Of a gateway that soon sees which worker is gone, and goes on asking one that has failed once, or is slow."""
HELD = frozenset(
    f"slipstream_{name}"
    for name in (
        "transfer_kept_prompts",
        "host_cache_bytes",
        "leased_pages",
        "pool_used",
        "pool_cached",
        "requests_running",
        "requests_waiting",
    )
)
WRONG = "slipstream_assert_failures_total"

Figures = dict[str, float]
Body = dict[str, Any]


def bodies(rng: random.Random, count: int) -> list[Body]:
    """Requests with prompts of some hundred tokens, no two with the same beginning. How long an answer is is known."""
    return [
        {
            "model": MODEL,
            "prompt": f"{rng.getrandbits(32)} {' '.join(rng.choices(WORDS, k=rng.randint(100, 500)))}",
            "max_tokens": rng.randint(40, 200),
            "temperature": 0.0,
            "ignore_eos": True,
            # So each token is text.
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]


@dataclass
class Told:
    """What a client has got of one stream so far."""

    text: str = ""
    events: int = field(default=0, compare=False)
    """With text; how many tokens come with one is by chance."""
    reason: str | None = None
    tokens: int | None = None
    """As the gateway counts them at the end."""
    done: bool = False
    """Nothing more comes, it was said."""
    error: str = ""
    left: bool = False
    """The client went away."""

    def read(self, smg: Smg, body: Body, leave: int | None) -> Told:
        """Read the answer to `body`, to its end or until `leave` events have come. Blocks."""
        with closing(smg.begin("POST", "/v1/completions", body)) as connection:
            self.left = leave == 0
            if self.left:
                return self
            try:
                with connection.getresponse() as answer:
                    self._follow(answer, leave)
            except (OSError, http.client.HTTPException) as error:
                self.error = f"{type(error).__name__}: {error}"
        return self

    def _follow(self, answer: http.client.HTTPResponse, leave: int | None) -> None:
        if answer.status != 200:
            self.error = f"{answer.status} {answer.read().decode()}"
            return
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                self._note(json.loads(line[6:]))
            if self.events == leave:
                self.left = True
                return

    def _note(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.events += bool(choice["text"])
            self.reason = choice.get("finish_reason") or self.reason
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]


class Streams:
    """Clients that ask at the same time, each on a thread. `told`: what they have got so far."""

    def __init__(
        self, threads: Executor, smg: Smg, asked: Sequence[Body], leave: Sequence[int | None] | None = None
    ) -> None:
        """`leave`: for each request, after how many events its client goes; None for one that stays."""
        loop = asyncio.get_running_loop()
        self.told = [Told() for _ in asked]
        together = zip(self.told, asked, leave or [None] * len(asked), strict=True)
        self._tasks = [loop.run_in_executor(threads, told.read, smg, body, place) for told, body, place in together]

    async def ended(self) -> list[Told]:
        """Wait for all ends."""
        await asyncio.gather(*self._tasks)
        return self.told


@dataclass(frozen=True)
class Fleet:
    """Servers of both roles, and the gateway that pairs them."""

    prefill: list[ServerProcess]
    decode: list[ServerProcess]
    smg: Smg

    @property
    def alive(self) -> list[ServerProcess]:
        """Those that have not ended."""
        return [each for each in (*self.prefill, *self.decode) if each.process.poll() is None]

    def is_known(self) -> bool:
        """Whether the gateway sends requests to just those."""
        healthy = {each["url"] for each in self.smg.workers() if each["is_healthy"]}
        return healthy == {f"grpc://{each.target}" for each in self.alive}


@contextmanager
def paired_fleet(folder: Path, dialect: str, **settings: Any) -> Iterator[Fleet]:
    """Two servers of each role and their gateway."""
    with ExitStack() as stack:
        roles = ("prefill", "prefill", "decode", "decode")
        started = [stack.enter_context(closing(server(role=role, **settings))) for role in roles]
        prefill, decode = [each.wait_ready() for each in started[:2]], [each.wait_ready() for each in started[2:]]
        smg = stack.enter_context(closing(pairing(folder, dialect, prefill, decode, **FLAGS)))
        yield Fleet(prefill, decode, smg.wait_ready(len(started)))


def server(**settings: Any) -> ServerProcess:
    """A server of the bundled model that starts."""
    given: dict[str, Any] = {"served_model_name": MODEL, "cpu_threads": 1, "max_total_tokens": 65536}
    given |= {"unnamed_callers": "watch", "gateway_tokenizer": "path", "transfer_timeout": TRANSFER_TIMEOUT}
    return ServerProcess(program="service", **({"forked": True} | given | settings))


async def reached(condition: Callable[[Figures], object], *servers: ServerProcess) -> ServerProcess:
    """The first of `servers` whose metrics meet `condition`, once those of one do."""
    end = time.monotonic() + PATIENCE
    while True:
        figures = [await each.metrics() for each in servers]
        for each, told in zip(servers, figures, strict=True):
            if condition(told):
                return each
        assert time.monotonic() < end, f"not within {PATIENCE:g} s: {figures}"
        await asyncio.sleep(PAUSE)


async def settled(servers: Sequence[ServerProcess]) -> None:
    """Wait until none of them holds anything for anybody. None may have found anything wrong with itself."""
    for each in servers:
        end = time.monotonic() + PATIENCE
        while held := await holdings(each):
            assert time.monotonic() < end, f"{held}\n{each.errors}"
            await asyncio.sleep(PAUSE)
        wrong = {name: value for name, value in (await each.metrics()).items() if name.startswith(WRONG) and value}
        assert not wrong, f"{wrong}\n{each.errors}"


async def holdings(asked: ServerProcess) -> Figures:
    """What it holds, once its cached prefixes are given up: host memory has some of those too."""
    # May be absent: then no test that asks this runs.
    from smg_grpc_proto.generated.common_pb2 import FlushCacheRequest
    from smg_grpc_proto.generated.sglang_scheduler_pb2 import GetServerInfoRequest
    from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

    async with asked.client() as client:
        stub = SglangSchedulerStub(client.channel)
        await stub.FlushCache(FlushCacheRequest(), timeout=PATIENCE)
        live = (await stub.GetServerInfo(GetServerInfoRequest(), timeout=PATIENCE)).active_requests
    figures = (await asked.metrics()) | {"live requests": live}
    held = HELD | {"live requests"}
    return {name: value for name, value in figures.items() if name.partition("{")[0] in held and value}
