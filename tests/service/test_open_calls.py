"""Who owns a request id while two requests want it: the one that the engine took, until that one ends."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import DuplicateRequest
from core.types.io import EmbedRequest, GenerateRequest
from service.admission import Admission
from service.auth import caller_name
from service.config import ServerConfig
from service.open_calls import OpenCalls


class OneAtATime:
    """An engine that lets a generation wait for `go` and then takes it, or refuses it for its id."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.arrived, self.go = asyncio.Event(), asyncio.Event()
        self.aborted: list[str] = []

    async def generate(self, request: GenerateRequest) -> Any:
        self.arrived.set()
        await self.go.wait()
        if self.refuses:
            raise DuplicateRequest("the id is taken")
        return request

    async def embed(self, request: EmbedRequest) -> Any:
        return SimpleNamespace(request_id=request.request_id)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True


async def may_abort(calls: OpenCalls, caller: str) -> bool:
    caller_name.set(caller)
    return await calls.abort("a")


@pytest.mark.parametrize("refuses", [True, False])
async def test_an_id_belongs_to_whom_the_engine_gave_it(refuses: bool) -> None:
    """A generation is still on its way when an embedding gets the same id; then either may end first."""
    engine = OneAtATime(refuses)
    slot: Any = SimpleNamespace(require=lambda: engine)
    metrics: Any = None
    calls = OpenCalls(slot, ServerConfig(), Admission(8, max_wait=1.0), metrics)

    async def generating() -> None:
        caller_name.set("early")
        async with AsyncExitStack() as held:
            await calls.generate(GenerateRequest(token_ids=(1,), request_id="a"), held)
            await done.wait()

    done = asyncio.Event()
    task = asyncio.create_task(generating())
    await engine.arrived.wait()
    assert not await may_abort(calls, "other")
    caller_name.set("late")
    async with AsyncExitStack() as held:
        await calls.embed(EmbedRequest(((1,),), request_id="a"), held)
        engine.go.set()
        if refuses:
            with pytest.raises(DuplicateRequest):
                await task
            assert not await may_abort(calls, "early") and await may_abort(calls, "late")
        else:
            await asyncio.sleep(0)
    if not refuses:
        await asyncio.sleep(0)
        assert not await may_abort(calls, "late") and await may_abort(calls, "early")
        done.set()
        await task
    assert await may_abort(calls, "anybody"), "nobody owns an id that no request has"
