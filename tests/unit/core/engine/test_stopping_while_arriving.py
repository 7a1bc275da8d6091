"""An engine that stops while requests are still being tokenised tells them so, and cancels none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from core.engine.async_engine import AsyncEngine
from core.engine.workers import Workers
from core.errors import Draining
from core.text.tokenizer import Tokenizer
from core.types.io import EmbedRequest, GenerateRequest
from tests.support.until import until
from tests.unit.core.engine.emulation import running


class Held:
    """Holds every call of the tokenizer until the test lets go."""

    def __init__(self, engine: AsyncEngine, patch: pytest.MonkeyPatch) -> None:
        self.gate, self.entered = threading.Event(), 0
        encode = engine._inputs.tokenizer.encode

        def held(*args: Any) -> Sequence[int]:
            self.entered += 1
            assert self.gate.wait(30)
            return encode(*args)

        patch.setattr(engine._inputs.tokenizer, "encode", held)


async def test_requests_behind_busy_tokenizer_threads_end_with_draining(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tokenizer) as engine:
        held = Held(engine, monkeypatch)
        asked = [asyncio.create_task(engine.generate(GenerateRequest(text="hello " * 50))) for _ in range(4)]
        texts = [asyncio.create_task(engine.tokenize("hello " * 50)) for _ in range(2)]
        await until(lambda: held.entered == 2)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.wait(asked[2:], timeout=5)
        held.gate.set()
        await stopping
        told = await asyncio.gather(*asked, *texts, return_exceptions=True)
        assert [type(each) for each in told] == [Draining] * 6, told


async def test_an_embedding_between_two_of_its_inputs_ends_with_draining(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tokenizer) as engine:
        held = Held(engine, monkeypatch)
        # The emulated model has none.
        monkeypatch.setattr(engine._embeddings, "_hidden_size", 8)
        asked = asyncio.create_task(engine.embed(EmbedRequest(inputs=("one " * 3_000, "two " * 3_000))))
        await until(lambda: held.entered == 1)
        await engine.stop()
        held.gate.set()
        (told,) = await asyncio.gather(asked, return_exceptions=True)
        assert isinstance(told, Draining), told


async def test_a_client_that_leaves_while_it_waits_is_cancelled_and_not_told_of_a_drain() -> None:
    workers, gate = Workers(1, "slipstream-test"), threading.Event()
    asked = [asyncio.create_task(workers.run(gate.wait, 30)) for _ in range(3)]
    await asyncio.sleep(0)
    workers.close()
    asked[2].cancel()
    told = await asyncio.gather(*asked[1:], return_exceptions=True)
    gate.set()
    assert [type(each) for each in told] == [Draining, asyncio.CancelledError]
    assert await asked[0]


async def test_a_client_that_leaves_while_a_thread_works_for_it_is_cancelled_too() -> None:
    workers, gate = Workers(1, "slipstream-test"), threading.Event()
    asked = asyncio.create_task(workers.run(gate.wait, 30))
    await asyncio.sleep(0)
    workers.close()
    asked.cancel()
    (told,) = await asyncio.gather(asked, return_exceptions=True)
    gate.set()
    assert type(told) is asyncio.CancelledError


async def test_work_whose_turn_came_in_the_moment_of_closing_ends_with_draining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers, gate = Workers(1, "slipstream-test"), threading.Event()
    leave = workers._line.leave

    def leave_and_close(*, long: bool) -> None:
        leave(long=long)
        workers.close()

    monkeypatch.setattr(workers._line, "leave", leave_and_close)
    asked = [asyncio.create_task(workers.run(gate.wait, 30)) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    first, second = await asyncio.gather(*asked, return_exceptions=True)
    assert first is True and type(second) is Draining, second


async def test_work_that_waits_for_a_thread_ends_with_draining() -> None:
    workers, gate = Workers(1, "slipstream-test"), threading.Event()
    busy = workers._pool.submit(gate.wait, 30)
    asked = asyncio.create_task(workers.run(gate.wait, 30))
    await asyncio.sleep(0)
    workers.close()
    (told,) = await asyncio.gather(asked, return_exceptions=True)
    gate.set()
    assert busy.result(30) and type(told) is Draining
