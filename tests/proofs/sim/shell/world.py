"""One seed, played: the production shell between clients that misbehave and a system that is made up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from core import buggify
from core.errors import EngineDead
from service.calls.open_calls import OpenCalls
from service.frontends.wire import Kind
from service.limits.admission import Admission
from service.server.served_engine import drained
from service.tenant_ids import scoped_id
from tests.proofs.sim.device import DeviceLost
from tests.proofs.sim.shell import books
from tests.proofs.sim.shell.clients import Client, Plan
from tests.proofs.sim.shell.closings import Closings
from tests.proofs.sim.shell.expected import Expected, embedded, expected
from tests.proofs.sim.shell.front_end import FrontEnd
from tests.proofs.sim.shell.inputs import Inputs
from tests.proofs.sim.shell.loop import Deadlock, Overdue, VirtualLoop
from tests.proofs.sim.shell.process import ADAPTERS, EngineProcess, made_up
from tests.proofs.sim.shell.scenario import ShellScenario
from tests.proofs.sim.shell.threads import Descriptors
from tests.proofs.sim.shell.trouble import Places, Trouble
from tests.proofs.sim.story import Hits, Story, Violation

LONGEST = 400.0
MOST_PASSES = 200_000
STATE_SECONDS = 0.25
SETTLE = 8.0
"""Seconds in which everything that was let go of is put away."""


class ShellWorld:
    """Everything of one run. `run` raises what the first oracle has to say."""

    process: EngineProcess
    closings: Closings

    def __init__(self, scenario: ShellScenario, story: Story, hits: Hits) -> None:
        self.scenario, self.story, self.hits = scenario, story, hits
        self._rng = random.Random(scenario.seed * 2)
        self.loop = VirtualLoop(random.Random(scenario.seed * 2 + 1), LONGEST, MOST_PASSES)
        self.front_ends: list[FrontEnd] = []
        self._all_front_ends: list[FrontEnd] = []
        self.ended = self._died = False
        """Whether the engine's end has begun."""
        self.aborted: set[str] = set()
        self.unloaded: set[str] = set()
        self.ids: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def dead(self) -> bool:
        """Whether the engine died, ever."""
        return self._died or self.process.engine.state.value == "dead"

    def run(self) -> None:
        """All of it."""
        places = Places(self, self.scenario.faults.get("buggify", 0.0), self._rng)
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with made_up(self.loop) as descriptors, buggify.hooked(places):
                self.loop.run_until_complete(self._main(descriptors))
        except (Deadlock, Overdue) as error:
            raise Violation("liveness", f"{error}: {self._waiting()}") from error
        finally:
            logging.disable(disabled)
            self._throw_away()

    def note(self, text: str) -> None:
        """One line of the story, with the time."""
        if self.story.tracing:
            self.story.lines.append(f"{self.loop.now * 1000:8.0f} ms  {text}")
        self.story.decided((round(self.loop.now * 1000), len(text)))

    def blame(self, error: BaseException) -> None:
        """The run ends with this."""
        if self.loop.fatal is None:
            self.loop.fatal = error

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A task that belongs to the run; what it raises ends the run."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def scoped(self, plan: Plan) -> str:
        """The id that the engine knows the plan's request by."""
        return scoped_id(plan.asked.request_id, plan.tenant)

    def door(self, local: bool) -> tuple[OpenCalls, FrontEnd | None]:
        """Where a client's call goes."""
        if local or not self.front_ends:
            return self._local, None
        front_end = self._rng.choice(self.front_ends)
        return front_end.calls, front_end

    def named(self, name: str) -> FrontEnd:
        """The front end of that name, present or past."""
        return next(each for each in self._all_front_ends if each.name == name)

    def replace(self, lost: FrontEnd) -> None:
        """Another front end starts in the place of one that is gone."""
        self.front_ends[self.front_ends.index(lost)] = self._start_front_end()
        self.hits("front_end_restarted")

    def expected(self, plan: Plan) -> list[Expected]:
        """What the outputs of a plan must be; of one that is refused, anything."""
        if plan.bad:
            return [expected([0], Inputs.NEUTRAL, 0, None)]
        adapter = self._adapter(plan)
        return [expected(plan.prompts[0], plan.asked.sampling, each, adapter) for each in range(plan.asked.sampling.n)]

    def vectors(self, plan: Plan) -> list[list[float]]:
        """What the vectors of a plan must be."""
        return [embedded(prompt, self._adapter(plan)) for prompt in plan.prompts]

    def _adapter(self, plan: Plan) -> int | None:
        return None if self.process.adapters is None else ADAPTERS.get(plan.adapter, 0)

    async def _main(self, descriptors: Descriptors) -> None:
        self.process = EngineProcess(self.scenario, self.loop, self._rng, self.story, self.hits)
        process, scenario = self.process, self.scenario
        self.closings = Closings(self, process)
        limit = float("inf") if scenario.max_concurrent is None else scenario.max_concurrent
        self._admission = Admission(limit, max_wait=scenario.admission_wait)
        self._local = OpenCalls(process.handle, process.config, self._admission, process.desk, process.metrics)
        self.front_ends = [self._start_front_end() for _ in range(scenario.front_ends)]
        background = [asyncio.create_task(self._publish(), name="publish"), asyncio.create_task(self._mourn())]
        plans = Inputs(scenario, self._rng).draw()
        self.ids.update(map(self.scoped, plans))
        for plan in plans:
            self.spawn(Client(self, plan, self._rng).run(), plan.name)
        self.spawn(Trouble(self, self._rng).run(), "trouble")
        if scenario.ending != "calm":
            self.spawn(self._end(), "the end")
        await self._all_gone()
        await self._close(background)
        books.check_tasks(process, 0 if self.dead else descriptors.open)

    async def _all_gone(self) -> None:
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _close(self, background: list[asyncio.Task[None]]) -> None:
        """Everybody has left. Nothing may be held, then nothing may run."""
        process = self.process
        await asyncio.sleep(self.scenario.resume_seconds + SETTLE)
        books.check_service(process, self._all_front_ends, [self._admission, *self._admissions()])
        books.check_engine(process)
        if not self.ended and not self.dead:
            books.check_pools(process)
            await self._stop("calm")
        for task in background:
            task.cancel()
        for front_end in self._all_front_ends:
            front_end.host.link.close()
            front_end.engine.link.close()
        await asyncio.gather(*background, return_exceptions=True)
        await asyncio.sleep(SETTLE)
        books.check_service(process, self._all_front_ends, [self._admission, *self._admissions()])
        books.check_engine(process)

    def _admissions(self) -> list[Admission]:
        return [front_end.admission for front_end in self._all_front_ends]

    async def _end(self) -> None:
        """The engine ends while clients are at it."""
        scenario, process = self.scenario, self.process
        await asyncio.sleep(scenario.ends_at)
        self.note(f"the end: {scenario.ending}")
        if scenario.ending in ("drain", "stop"):
            await self._stop(scenario.ending)
        elif scenario.ending == "step_fails":
            process.device.fail_next = True
        else:
            process.device.hangs = True

    async def _stop(self, how: str) -> None:
        """As `service.frontends.group` drains or closes."""
        process = self.process
        self.ended = True
        self.hits(f"end_{how}")
        if how != "stop":
            process.handle.draining = True
            for front_end in self.front_ends:
                front_end.publish(leaving=True)
            cut = await drained(process.engine, self.scenario.grace)
            self.note(f"drained, {cut} were cut")
            if how == "calm" and cut:
                raise Violation("drain", f"everybody had left, and {cut} were cut")
            await self._tell_front_ends(dead=False)
        await process.engine.stop()
        self.note("stopped")

    async def _tell_front_ends(self, *, dead: bool) -> None:
        for front_end in self.front_ends:
            front_end.host.send(Kind.CLOSE, {"dead": dead})
        patience = 8.0
        while patience > 0 and not all(front_end.host.lost for front_end in self.front_ends):
            await asyncio.sleep(0.1)
            patience -= 0.1
        for front_end in self.front_ends:
            front_end.host.link.close()

    async def _mourn(self) -> None:
        """As `service.cli.lifecycle`: the process goes when its engine has died."""
        cause = await self.process.engine.wait_dead()
        planned = {"step_fails": DeviceLost, "hang": TimeoutError}.get(self.scenario.ending)
        if planned is None or not isinstance(cause, planned):
            self.blame(cause)
        self._died = self.ended = True
        self.note(f"{EngineDead.reason}: {cause!r}")
        self.hits(f"end_{self.scenario.ending}")
        await self._tell_front_ends(dead=True)
        await self.process.engine.stop()

    async def _publish(self) -> None:
        while True:
            busy = self.loop.now < self.scenario.span
            await asyncio.sleep(STATE_SECONDS if busy else SETTLE / 4)
            for front_end in self.front_ends:
                front_end.publish(leaving=self.ended)

    def _start_front_end(self) -> FrontEnd:
        number = len(self._all_front_ends)
        self._all_front_ends.append(FrontEnd(number, self.process, self.scenario, self.loop, self._rng))
        return self._all_front_ends[-1]

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.blame(error)

    def _waiting(self) -> str:
        return ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self.loop) if not task.done()))

    def _throw_away(self) -> None:
        """Of a run that failed: what hangs in the loop goes without a word."""
        loop = self.loop
        for front_end in self._all_front_ends:
            self.hits.counts["paused"] += sum(end.paused for end in front_end.ends)
        loop.forgiving = True
        thrown: set[asyncio.Task[Any]] = set()
        # A coroutine that is closed may begin tasks, or fail for want of its loop: that is not what the run came to.
        asyncio._set_running_loop(loop)
        try:
            while left := asyncio.all_tasks(loop) - thrown:
                for task in left:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(Exception):
                        task.get_coro().close()  # type: ignore[union-attr]
                thrown |= left
        finally:
            asyncio._set_running_loop(None)
        loop.close()
