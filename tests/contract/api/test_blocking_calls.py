"""Calls of blocking clients on their thread: how callers wait, how calls end with client and thread, and interrupts."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from service.client import CallFailed
from service.client.blocking_calls import BlockingCalls
from service.client.loop_thread import LoopEnded, LoopThread
from tests.chaos.process import PATIENCE
from tests.support.blocking import interruptible, outcome, threads
from tests.support.repository import ROOT


def test_a_closed_call_says_so() -> None:
    """What waits is known to wait, beside another client: the thread goes on."""
    calls, other, begun = BlockingCalls(), BlockingCalls(), threading.Event()

    async def silent() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcome, lambda: calls.run(silent))
        assert begun.wait(PATIENCE)
        calls.close()
        error = waiting.result(PATIENCE)
    assert isinstance(error, CallFailed) and error.code is grpc.StatusCode.CANCELLED
    assert error.message == "the client was closed"
    other.close()


def test_events_of_a_call_find_its_loop_when_the_thread_has_ended() -> None:
    """gRPC brings some late, by any thread that polls, and complains on the terminal if it cannot."""

    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    first, came = BlockingCalls(), threading.Event()
    of_call = first.run(loop)
    first.close()
    assert threads() == []
    assert outcome(lambda: of_call.call_soon_threadsafe(came.set)) is None
    second = BlockingCalls()
    assert second.run(loop) is of_call and came.wait(PATIENCE)
    second.close()


def test_what_runs_on_the_thread_ends_with_it() -> None:
    """Whatever was not ended before."""
    thread, begun, ended = LoopThread.acquire(), threading.Event(), threading.Event()

    async def waits() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcome, lambda: thread.run(waits()))
        assert begun.wait(PATIENCE)
        thread.release()
        assert isinstance(waiting.result(PATIENCE), CancelledError) and ended.is_set()
    with pytest.raises(LoopEnded):
        thread.run(waits())


def test_what_is_sent_while_the_thread_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, send = LoopThread.acquire(), asyncio.run_coroutine_threadsafe
    found: list[BaseException | None] = []

    def late(*args: Any) -> Any:
        thread.release()
        return send(*args)

    async def five() -> int:
        return 5

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    caller = threading.Thread(target=lambda: found.append(outcome(lambda: thread.run(five()))), daemon=True)
    caller.start()
    caller.join(PATIENCE)
    assert [type(error) for error in found] == [CancelledError]
    monkeypatch.undo()
    # Its loop, and what was sent to it, goes to the next thread.
    BlockingCalls().close()


def test_an_iterator_ends_with_its_client() -> None:
    """Half read, while nothing waits for it."""
    ended: list[bool] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            ended.append(True)

    calls = BlockingCalls()
    half = calls.iterate(numbers())
    assert next(half) == 1
    calls.close()
    assert ended == [True]
    half.close()


def test_an_iterator_may_be_dropped_on_the_thread_itself() -> None:
    """As the garbage collector does, which runs on any thread."""
    closed = threading.Event()

    async def numbers():  # type: ignore[no-untyped-def]
        try:
            yield 1
            yield 2
        finally:
            closed.set()

    async def drop() -> None:
        held.clear()

    calls = BlockingCalls()
    try:
        held = [calls.iterate(numbers())]
        assert next(held[0]) == 1
        calls.run(drop)
        assert closed.wait(PATIENCE)
    finally:
        calls.close()


def test_an_interrupted_call_is_cancelled() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def waits() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    main = threading.main_thread().ident
    assert main is not None
    thread = LoopThread.acquire()
    interrupt = threading.Thread(target=lambda: (begun.wait(PATIENCE), signal.pthread_kill(main, signal.SIGINT)))
    interrupt.start()
    try:
        with interruptible(), pytest.raises(KeyboardInterrupt):
            thread.run(waits())
        assert ended.wait(PATIENCE)
    finally:
        interrupt.join()
        thread.release()


def test_a_wait_is_made_of_pieces_and_a_timeout_of_the_call_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does not notice a signal that comes right before a wait without a bound; one test once took for ever."""
    monkeypatch.setattr("service.client.loop_thread.NOTICED_AFTER", 0.001)
    waits: list[float | None] = []
    result = Future.result

    def counted(future: Future[Any], timeout: float | None = None) -> Any:
        waits.append(timeout)
        if len(waits) == 5 or timeout is None:
            thread._loop.call_soon_threadsafe(go_on.set)
        return result(future, timeout)

    monkeypatch.setattr(Future, "result", counted)
    thread, go_on = LoopThread.acquire(), asyncio.Event()

    async def waiting() -> str:
        await go_on.wait()
        return "done"

    async def late() -> None:
        raise TimeoutError("its own")

    try:
        assert thread.run(waiting()) == "done"
        assert set(waits) == {0.001} and len(waits) >= 5
        with pytest.raises(TimeoutError, match="its own"):
            thread.run(late())
    finally:
        thread.release()


def test_an_interrupt_before_the_wait_for_an_event_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is on its way to the thread, and the caller does not yet wait for it."""
    begun, closed = threading.Event(), threading.Event()

    async def silent() -> AsyncGenerator[int, None]:
        try:
            begun.set()
            await asyncio.Event().wait()
            yield 0
        finally:
            closed.set()

    send = asyncio.run_coroutine_threadsafe

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", send)
        send(*args)
        assert begun.wait(PATIENCE)
        raise KeyboardInterrupt

    def read() -> None:
        with pytest.raises(KeyboardInterrupt):
            next(calls.iterate(silent()))

    calls = BlockingCalls()
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(PATIENCE)
    assert not reader.is_alive() and closed.is_set()
    calls.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("far", ["before", "sent", "begun"])
def test_an_interrupt_while_a_call_is_sent_leaves_nothing_running(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[object] = []
    begun = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    send = asyncio.run_coroutine_threadsafe

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", send)
        if far != "before":
            send(*args)
        assert far != "begun" or begun.wait(PATIENCE)
        raise KeyboardInterrupt

    async def waits() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def running() -> set[asyncio.Task[Any]]:
        """After a while."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        return (await asyncio.wait(others, timeout=1))[1] if others else set()

    thread = LoopThread.acquire()
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(waits())
    assert not thread.run(running())
    thread.release()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gc.collect()
    assert said == [] and ignored == []


FORKED = """
import os
from service.client.blocking_calls import BlockingCalls
from service.client.loop_thread import LoopThread
async def five():
    return 5
before, calls = LoopThread.acquire(), BlockingCalls()
child = os.fork()
if not child:
    try:
        before.run(five())
    except RuntimeError:
        calls.close()
        os._exit(LoopThread.acquire().run(five()))
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), before.run(five()))
"""


def test_a_child_of_a_fork_has_a_thread_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("5 5\n", "")
