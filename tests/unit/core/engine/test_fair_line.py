"""Turns by caller in rotation: no caller waits for all that another has asked for; long turns leave a place free."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from core.engine.fair_line import FairLine
from core.engine.workers import Workers
from core.errors import Draining


class Served:
    """Turns taken, in order, that end when the test says so."""

    def __init__(self, places: int) -> None:
        self.line = FairLine(places)
        self.order: list[str] = []
        self.running: list[tuple[str, bool]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, caller: str, long: bool = False) -> asyncio.Task[None]:
        async def turn() -> None:
            await self.line.enter(caller, long=long)
            self.order.append(caller)
            self.running.append((caller, long))

        self.tasks.append(asyncio.create_task(turn()))
        await asyncio.sleep(0)
        return self.tasks[-1]

    async def end(self) -> None:
        """The oldest turn is over."""
        _, long = self.running.pop(0)
        self.line.leave(long=long)
        await asyncio.sleep(0)


async def test_a_caller_with_many_waits_behind_itself() -> None:
    served = Served(1)
    for _ in range(50):
        await served.ask("flood")
    await served.ask("other")
    await served.ask("third")
    await served.ask("other")
    for _ in range(7):
        await served.end()
    assert served.order == ["flood", "flood", "other", "third", "flood", "other", "flood", "flood"]


async def test_long_turns_leave_a_place_for_short_ones() -> None:
    served = Served(2)
    for _ in range(10):
        await served.ask("flood", long=True)
    assert served.running == [("flood", True)]
    await served.ask("other")
    assert served.order == ["flood", "other"], "at once"
    await served.end()
    assert served.order[-1] == "flood"


async def test_long_turns_are_not_kept_waiting_by_short_ones_for_ever() -> None:
    served = Served(2)
    for caller in ("a", "b"):
        await served.ask(caller)
    for _ in range(20):
        await served.ask("flood")
    await served.ask("other", long=True)
    for _ in range(3):
        await served.end()
    assert "other" in served.order


async def test_one_place_serves_both() -> None:
    served = Served(1)
    await served.ask("a", long=True)
    await served.ask("b")
    await served.end()
    await served.ask("c", long=True)
    await served.end()
    assert served.order == ["a", "b", "c"]


async def test_whoever_leaves_holds_nothing(seed: int) -> None:
    """Whenever it leaves: in line, in the moment of its turn, or before it has looked."""
    rng, served = random.Random(seed), Served(3)
    for _ in range(300):
        task = await served.ask(rng.choice("abc"), rng.random() < 0.3)
        if rng.random() < 0.4 and not task.done():
            task.cancel()
        if served.running and rng.random() < 0.6:
            _, long = served.running.pop(rng.randrange(len(served.running)))
            served.line.leave(long=long)
            if rng.random() < 0.3:
                for waiting in [each for each in served.tasks if not each.done()][:1]:
                    waiting.cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    while served.running or any(not task.done() for task in served.tasks):
        await asyncio.sleep(0)
        if served.running:
            await served.end()
    line = served.line
    assert (line._free, line._long_free, bool(line._short), bool(line._long)) == (3, 2, False, False)


async def test_a_turn_that_comes_to_one_who_is_leaving_is_the_next_ones() -> None:
    """In the moment between the cancellation and the first run of its task."""
    served = Served(1)
    await served.ask("a")
    leaving = await served.ask("b")
    await served.ask("c")
    leaving.cancel()
    await served.end()
    await asyncio.gather(leaving, return_exceptions=True)
    assert served.order == ["a", "c"], "a free place while one waits"


async def test_those_who_wait_are_told_when_it_ends() -> None:
    served = Served(1)
    await served.ask("a")
    waiting = [await served.ask("b"), await served.ask("c", long=True)]
    served.line.fail(Draining("the end"))
    for task in waiting:
        with pytest.raises(Draining):
            await task


async def test_work_that_was_left_holds_its_thread_until_it_ends() -> None:
    """Otherwise more would be begun than there are threads, and wait in the pool, in no fair order."""
    workers, gate, begun = Workers(1, "slipstream-test"), threading.Event(), list[str]()

    def work(name: str) -> None:
        begun.append(name)
        gate.wait(30)

    left = asyncio.create_task(workers.run(work, "left", caller="a"))
    while not begun:
        await asyncio.sleep(0.001)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    others = [asyncio.create_task(workers.run(work, name, caller=name)) for name in ("b", "b", "c")]
    await asyncio.sleep(0.05)
    assert begun == ["left"] and not workers._pool._work_queue.qsize()
    gate.set()
    await asyncio.gather(*others)
    assert begun == ["left", "b", "c", "b"]
    workers.close()
