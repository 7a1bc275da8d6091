"""Whose a request id is: each tenant's own, and within a tenant that of the request which the engine took.

And when a call is refused before it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.errors import DuplicateRequest, InvalidRequest, Overloaded
from core.types.io import EmbedRequest, GenerateRequest
from service.access.caller import caller_name
from service.calls.desk import LocalDesk
from service.calls.open_calls import OpenCalls
from service.config.server_config import ServerConfig
from service.limits.admission import CONCURRENCY_LIMIT, Admission
from service.metrics.rpc import RpcMetrics
from tests.support.until import turns


class OneAtATime:
    """An engine as far as ids go: a live one is not taken twice. Generating waits for `go`, then runs or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.arrived, self.go = asyncio.Event(), asyncio.Event()
        self.live: set[str] = set()
        self.aborted: list[str] = []

    async def generate(self, request: GenerateRequest) -> Any:
        self._take(request.request_id)
        self.arrived.set()
        await self.go.wait()
        if self.fails:
            self.live.remove(request.request_id)
            raise InvalidRequest.of("constraint", "cannot be compiled")
        return SimpleNamespace(request_id=request.request_id)

    async def embed(self, request: EmbedRequest) -> Any:
        self._take(request.request_id)
        return SimpleNamespace(request_id=request.request_id)

    def _take(self, request_id: str) -> None:
        if request_id in self.live:
            raise DuplicateRequest("a live request has this request_id")
        self.live.add(request_id)

    def abort(self, request_id: str) -> bool:
        if request_id in self.live:
            self.aborted.append(request_id)
        return request_id in self.live

    def full(self, tenant: str) -> bool:
        return False


def open_calls(engine: OneAtATime, admission: Admission | None = None) -> OpenCalls:
    handle: Any = SimpleNamespace(require=lambda: engine)
    metrics = RpcMetrics(CollectorRegistry())
    config = ServerConfig()
    admission = admission or Admission(8, max_wait=1.0)
    return OpenCalls(handle, config, admission, LocalDesk(handle, config, metrics), metrics)


async def may_abort(calls: OpenCalls, caller: str | None) -> bool:
    caller_name.set(caller)
    return await calls.abort("a")


@asynccontextmanager
async def generating(calls: OpenCalls, engine: OneAtATime, caller: str | None) -> AsyncIterator[asyncio.Task[Any]]:
    """A generation of `caller` under the id "a", which has reached the engine and waits there."""

    async def generate() -> Any:
        caller_name.set(caller)
        async with AsyncExitStack() as held:
            return await calls.generate(GenerateRequest(token_ids=(1,), request_id="a"), held)

    engine.arrived.clear()
    task = asyncio.create_task(generate())
    await engine.arrived.wait()
    yield task
    engine.go.set()
    await asyncio.gather(task, return_exceptions=True)


async def embed(calls: OpenCalls, caller: str | None) -> None:
    caller_name.set(caller)
    async with AsyncExitStack() as held:
        await calls.embed(EmbedRequest(((1,),), request_id="a"), held)


async def test_one_id_of_two_tenants_is_two_requests() -> None:
    """A generation is still on its way when another tenant embeds under its id: each reaches its own, nobody both."""
    engine = OneAtATime()
    calls = open_calls(engine)
    async with generating(calls, engine, "early") as task:
        assert not await may_abort(calls, "late"), "not before it has one of its own"
        await embed(calls, "late")
        assert not await may_abort(calls, "other") and not await may_abort(calls, None)
        assert await may_abort(calls, "late") and await may_abort(calls, "early")
    assert (await task).request_id in engine.live
    first, second = engine.aborted
    assert first != second and engine.live == {first, second}


@pytest.mark.parametrize("caller", ["early", None])
@pytest.mark.parametrize("fails", [True, False])
async def test_an_id_belongs_to_whom_the_engine_gave_it(caller: str | None, fails: bool) -> None:
    """A tenant's second request under a live id is refused, and takes nothing from the first; then the id is free."""
    engine = OneAtATime(fails)
    calls = open_calls(engine)
    async with generating(calls, engine, caller) as task:
        with pytest.raises(DuplicateRequest):
            await embed(calls, caller)
        assert await may_abort(calls, caller), "the refused one did not take the id with it"
    assert await may_abort(calls, caller) is not fails
    if fails:
        assert isinstance(task.exception(), InvalidRequest)
        await embed(calls, caller)


async def test_names_and_ids_that_look_alike_are_not() -> None:
    engine = OneAtATime()
    calls = open_calls(engine)
    for caller in ("a", None, "a.a", "a:a"):
        await embed(calls, caller)
    assert len(engine.live) == 4
    with pytest.raises(InvalidRequest):
        await calls.abort("")


async def test_while_the_line_that_all_share_is_full_a_call_is_refused_before_it_is_read() -> None:
    admission = Admission(1, max_wait=60.0, max_waiters=1)
    calls = open_calls(OneAtATime(), admission)
    await admission.enter()
    calls.refuse_hopeless(None)
    waiting = asyncio.create_task(admission.enter())
    await turns(2)
    with pytest.raises(Overloaded) as refused:
        calls.refuse_hopeless(None)
    assert refused.value.reason == CONCURRENCY_LIMIT
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
