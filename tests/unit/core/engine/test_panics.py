"""What is no Exception (a panic of native code, SystemExit, a stray cancellation) ends every stream at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.result import StepBroken
from core.engine import async_engine
from core.engine.api import EngineState
from core.engine.async_engine import AsyncEngine
from core.engine.off_loop import WorkBroken, off_loop
from core.engine.watchdog import MOST_PER_LOOK, Watchdog
from core.errors import EngineDead, TextFailed
from core.executor.completion import Completion
from core.executor.launched_step import LaunchedStep
from core.executor.step import StepRunner
from core.scheduler.scheduler import Scheduler
from core.text.tokenizer import Tokenizer
from service.bench.emulated import TimelineEvent, expected_output
from tests.unit.core.engine.emulation import HookedModel, ask, last, read, running

AT = 10
"""The step that fails."""


class Panic(BaseException):
    """Like `pyo3_runtime.PanicException`: no Exception."""


BREAKERS = (Panic("index out of bounds"), SystemExit(1), asyncio.CancelledError("stray"), MemoryError("no more"))
Planted = Callable[[pytest.MonkeyPatch, BaseException], None]


def at_launch(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    inner = StepRunner.launch

    def launch(self: StepRunner, batch: Any, *told: Any) -> LaunchedStep:
        if batch.step_id >= AT:
            raise error
        return inner(self, batch, *told)

    patch.setattr(StepRunner, "launch", launch)


def in_the_result(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    inner = LaunchedStep.result

    def result(self: LaunchedStep) -> Any:
        if self.batch.step_id >= AT:
            raise error
        return inner(self)

    patch.setattr(LaunchedStep, "result", result)


def where_a_step_is_let_go(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The callback into the executor, which hands over the step before; its result is lost with it."""
    inner = Completion.bring

    def bring(self: Completion, launched: Any) -> None:
        step_id = launched.step_id if hasattr(launched, "step_id") else launched.batch.step_id
        if step_id >= AT:
            raise error
        inner(self, launched)

    patch.setattr(Completion, "bring", bring)


async def assert_all_end(engine: AsyncEngine, error: BaseException) -> BaseException:
    """Every stream ends at once, the process is told, and nothing is let in any more; what it was told."""
    streams = [await engine.generate(ask((n + 1,), tokens=500)) for n in range(6)]
    for stream in streams:
        with pytest.raises(EngineDead):
            await asyncio.wait_for(last(stream), 10)
    told = await asyncio.wait_for(engine.wait_dead(), 10)
    assert engine.state is EngineState.DEAD and engine.live_requests == 0
    with pytest.raises(EngineDead):
        await engine.generate(ask())
    return told


@pytest.mark.parametrize("error", BREAKERS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("plant", "overlap"),
    [
        (at_launch, True),
        (at_launch, False),
        (in_the_result, True),
        (in_the_result, False),
        (where_a_step_is_let_go, True),
    ],
)
async def test_in_the_executor(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, plant: Planted, overlap: bool, error: BaseException
) -> None:
    plant(monkeypatch, error)
    async with running(tokenizer, overlap=overlap, max_running_requests=4) as engine:
        told = await assert_all_end(engine, error)
        if isinstance(error, Exception):
            assert told is error
        else:
            assert isinstance(told, StepBroken) and told.__cause__ is error
            assert type(error).__name__ in str(told) and str(error) in str(told)


async def test_on_the_thread_that_waits_for_copies(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator's copies are not done when a step is let go: another thread waits for them."""
    panic, threads = Panic("copy"), set[str]()
    monkeypatch.setattr(TimelineEvent, "query", lambda self: False)
    inner = LaunchedStep.result

    def result(self: LaunchedStep) -> Any:
        threads.add(threading.current_thread().name)
        if self.batch.step_id >= AT:
            raise panic
        return inner(self)

    monkeypatch.setattr(LaunchedStep, "result", result)
    async with running(tokenizer) as engine:
        told = await assert_all_end(engine, panic)
        assert told.__cause__ is panic and threads == {"slipstream-completion"}


async def test_a_wake_up_that_panics_on_either_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for waits in (False, True):
        panic = Panic("wake")
        with monkeypatch.context() as patch:
            if waits:
                patch.setattr(TimelineEvent, "query", lambda self: False)
            async with running(tokenizer) as engine:
                executor: Any = engine._executor
                wake, calls = executor._completion._wake, [0]

                def wakes(wake: Callable[[], None] = wake, calls: list[int] = calls, panic: Panic = panic) -> None:
                    calls[0] += 1
                    if calls[0] == AT:
                        raise panic
                    wake()

                executor._completion._wake = wakes
                assert (await assert_all_end(engine, panic)).__cause__ is panic


@pytest.mark.parametrize("where", ["step", "_emit"])
async def test_on_the_event_loop(tokenizer: Tokenizer, where: str) -> None:
    panic = Panic(where)
    async with running(tokenizer) as engine:
        scheduler: Any = engine._scheduler
        inner, calls = getattr(scheduler, where), [0]

        def breaks(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] > AT:
                raise panic
            return inner(*arguments)

        setattr(scheduler, where, breaks)
        assert await assert_all_end(engine, panic) is panic


async def test_a_snapshot_that_cannot_be_taken_keeps_no_stream_waiting(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Panic("books")

    def publish(self: Scheduler) -> None:
        raise error

    async with running(tokenizer) as engine:
        engine._scheduler.publish = publish.__get__(engine._scheduler)  # type: ignore[method-assign]
        assert await assert_all_end(engine, error) is error


@pytest.mark.parametrize("place", [0, 1])
async def test_a_task_of_the_engine_that_ends_ends_the_engine(tokenizer: Tokenizer, place: int) -> None:
    async with running(tokenizer) as engine:
        stream = await engine.generate(ask(tokens=1000))
        engine._tasks[place].cancel()
        with pytest.raises(EngineDead):
            await asyncio.wait_for(last(stream), 10)
        assert "was cancelled" in str(await asyncio.wait_for(engine.wait_dead(), 10))


async def test_stopping_cancels_the_tasks_and_kills_nothing(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        tasks = list(engine._tasks)
    assert all(task.cancelled() for task in tasks), "CancelledError went through"
    assert engine.state is EngineState.STOPPED and not engine._dead.done()


async def test_a_panic_in_a_pool_of_threads_reaches_its_caller_as_an_exception() -> None:
    pool = ThreadPoolExecutor(1)
    # A future that is given a StopIteration would never end.
    for error in (*BREAKERS[:3], StopIteration()):

        def breaks(error: BaseException = error) -> None:
            raise error

        try:
            await asyncio.wait_for(off_loop(pool, breaks), 20)
        except BaseException as raised:
            caught = raised
        assert isinstance(caught, WorkBroken) and caught.__cause__ is error and type(error).__name__ in str(caught)
    assert await off_loop(pool, lambda: 7) == 7, "and the thread lives on"
    pool.shutdown()


async def test_a_prompt_whose_tokenizer_panics_fails_alone(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:

        def prompt_ids(*_: Any) -> list[int]:
            raise Panic("tokenizer")

        neighbour = asyncio.create_task(read(engine, ask((3, 3), tokens=100)))
        engine._inputs.tokenizer.encode = prompt_ids  # type: ignore[method-assign]
        try:
            with pytest.raises(TextFailed):
                await engine.tokenize("some text")
        finally:
            del engine._inputs.tokenizer.encode
        assert (await neighbour)[0] == expected_output([3, 3], 100, tokenizer.vocab_size)


async def test_a_process_that_was_stopped_is_no_hanging_device(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps by an hour in the middle of a step, as it does across SIGSTOP; the step then comes back."""
    jump, model = [0.0], HookedModel(tokenizer)
    looks = list[tuple[int, bool]]()
    inner = Watchdog.hangs

    def hangs(self: Watchdog, now: float, newest: int, in_flight: int) -> bool:
        looks.append((in_flight, inner(self, now, newest, in_flight)))
        return looks[-1][1]

    def stall(step: int, logits: torch.Tensor, batch: ForwardBatch) -> None:
        if step == AT:
            wait_for_looks(2)  # the second one finds no new result
            jump[0] = 3600.0
            wait_for_looks(2)

    def wait_for_looks(count: int) -> None:
        seen = len(looks)
        while len(looks) < seen + count:
            time.sleep(0.01)

    class Clock:
        monotonic = staticmethod(lambda: time.monotonic() + jump[0])

    monkeypatch.setattr(async_engine, "time", Clock)
    monkeypatch.setattr(async_engine, "PERIOD", 0.05)
    monkeypatch.setattr(Watchdog, "hangs", hangs)
    model.hook = stall
    async with running(tokenizer, model, hang_timeout=600.0) as engine:
        assert (await read(engine, ask((4, 4), tokens=40)))[0] == expected_output([4, 4], 40, tokenizer.vocab_size)
        assert any(in_flight for in_flight, _ in looks) and engine.state is EngineState.READY


def test_the_watchdog_counts_its_looks() -> None:
    watchdog = Watchdog(10.0, 0.0)
    assert not watchdog.hangs(1.0, 5, 2)
    assert not watchdog.hangs(100_000.0, 5, 2) and watchdog.waited == MOST_PER_LOOK
    hung = [watchdog.hangs(100_000.0 + second, 5, 2) for second in range(1, 10)]
    assert hung == [False] * 8 + [True], "a device that hangs is still found"
    assert not watchdog.hangs(100_010.0, 6, 2), "a result starts the count again"
    assert not watchdog.hangs(100_020.0, 6, 0) and watchdog.waited == 0.0


async def test_a_wake_up_that_got_lost_costs_one_period(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many in a row as there are steps in flight, and more: a step behind the silent one wakes nothing up either."""
    monkeypatch.setattr(async_engine, "PERIOD", 0.05)
    async with running(tokenizer) as engine:
        executor: Any = engine._executor
        wake, lost = executor._completion._wake, list[int]()

        def wakes() -> None:
            if engine.stats.step >= AT and len(lost) < 4:
                lost.append(engine.stats.step)
            else:
                wake()

        executor._completion._wake = wakes
        got, *_ = await asyncio.wait_for(read(engine, ask((4, 4), tokens=40)), 10)
        assert got == expected_output([4, 4], 40, tokenizer.vocab_size) and len(lost) == 4


async def test_work_that_ends_as_an_iterator_does_is_not_waited_for_in_vain() -> None:
    """asyncio's futures take no StopIteration, so one would leave its caller, and the turn of its thread, for ever."""
    with ThreadPoolExecutor(1) as pool:
        work = off_loop(pool, next, iter(()))
        await asyncio.wait((work,), timeout=5)
        assert work.done() and isinstance(work.exception(), WorkBroken)
