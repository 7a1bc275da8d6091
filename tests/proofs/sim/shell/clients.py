"""The clients: each sends one request by one door, reads as it likes, and looks at everything that it is told."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core.errors import SlipstreamError
from core.types.io import EmbedRequest, GenerateRequest
from service.access.caller import caller_name
from service.calls.open_calls import OpenCalls
from tests.proofs.sim.shell.history import History, check_vectors
from tests.proofs.sim.shell.legal import refuse_illegal
from tests.proofs.sim.story import Violation

if TYPE_CHECKING:
    from tests.proofs.sim.shell.front_end import FrontEnd
    from tests.proofs.sim.shell.world import ShellWorld


@dataclass(slots=True)
class Plan:
    """What a client is going to do, drawn before it does anything."""

    name: str
    kind: str
    """`generate`, `keep`, `embed` or `abort`."""
    asked: Any
    tenant: str | None
    at: float
    local: bool
    prompts: list[list[int]] = field(default_factory=list)
    bad: bool = False
    adapter: str = ""
    pace: float = 0.0
    """Seconds that writing one event takes at most."""
    dead_after: int = -1
    """Events after which it reads no more; -1: it reads them all."""
    cancel_after: float = -1.0
    """Seconds after which its call is cancelled; -1: it is not."""
    aborts: list[float] = field(default_factory=list)
    """Seconds after which its request is aborted by id."""
    leaves: list[int] = field(default_factory=list)
    """Of a kept stream: events after which the connection breaks, call by call."""
    gap: float = 0.0
    """Seconds at most until it comes back."""
    rival: bool = False
    """It wants the stream of another one, as that does."""


class Client:
    """One of them. `run` is its task; whatever it must object to ends the run."""

    def __init__(self, world: ShellWorld, plan: Plan, rng: random.Random) -> None:
        self.world, self.plan, self._rng = world, plan, rng
        self.began_at = self.left_at = 0.0
        self.front_end: FrontEnd | None = None
        self.lost_front_ends: list[FrontEnd] = []
        self.cancelled = False
        self.opened = False
        """Whether it ever had its stream."""
        self._cancelling: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """All of it."""
        loop, plan = self.world.loop, self.plan
        await asyncio.sleep(plan.at)
        self.began_at = loop.now
        caller_name.set(plan.tenant)
        for delay in plan.aborts:
            self.world.spawn(self._abort(delay), f"{plan.name}: abort")
        task = asyncio.current_task()
        assert task is not None
        if plan.cancel_after >= 0:
            self._cancelling = loop.call_later(plan.cancel_after, self._cancel, task)
        self.world.note(f"{plan.name} begins: {self._described()}")
        try:
            await (self._embed() if plan.kind == "embed" else self._generate())
        except Violation as violation:
            self.world.blame(violation)
        except asyncio.CancelledError:
            if not self.cancelled:
                self.world.blame(Violation("foreign_cancel", f"{plan.name} is cancelled, and no caller cancelled it"))
            self.world.note(f"{plan.name} was cancelled")
            self.world.hits("cancelled")
        except Exception as error:
            self.world.blame(Violation("untyped_error", f"{plan.name} gets {error!r}"))
        finally:
            if self._cancelling is not None:
                self._cancelling.cancel()

    def _described(self) -> str:
        plan = self.plan
        door = "here" if plan.local else "by a front end"
        return f"{plan.kind} {plan.asked.request_id!r} of {plan.tenant} {door}"

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self.cancelled = True
            self.world.note(f"{self.plan.name} is being cancelled")
            task.cancel()

    async def _abort(self, delay: float) -> None:
        """A caller that knows the id ends it."""
        await asyncio.sleep(delay)
        caller_name.set(self.plan.tenant)
        calls, front_end = self.world.door(self.plan.local)
        if front_end is not None:
            self.lost_front_ends.append(front_end)
        self.world.aborted.add(self.world.scoped(self.plan))
        self.world.note(f"abort of {self.plan.name}")
        try:
            if await calls.abort(self.plan.asked.request_id):
                self.world.hits("abort_found")
                self.world.closings.aborted(self.world.scoped(self.plan))
        except SlipstreamError as error:
            refuse_illegal(self, error, aborting=True)

    def _door(self) -> OpenCalls:
        calls, self.front_end = self.world.door(self.plan.local)
        if self.front_end is not None:
            self.lost_front_ends.append(self.front_end)
            self.front_end.open += 1
        return calls

    def _leave_door(self) -> None:
        if self.front_end is not None:
            self.front_end.open -= 1
            self.front_end = None

    async def _embed(self) -> None:
        asked: EmbedRequest = self.plan.asked
        calls = self._door()
        try:
            async with AsyncExitStack() as held:
                call = await calls.embed(asked, held)
                held.push_async_callback(call.aclose)
                result = await call.result()
                check_vectors(self.plan.name, result, self.world.vectors(self.plan), normalized=asked.normalize)
                self.world.hits("embedded")
                self.world.note(f"{self.plan.name} has its vectors")
        except SlipstreamError as error:
            refuse_illegal(self, error)
        finally:
            self._leave_door()

    async def _generate(self) -> None:
        """One call, or for a kept stream as many as it takes."""
        plan = self.plan
        asked: GenerateRequest = plan.asked
        history = History(plan.name, asked, plan.prompts[0], self.world.expected(plan))
        history.request_id = self.world.scoped(plan)
        failed = False
        leaves = list(plan.leaves)
        while True:
            try:
                left = await self._read(history, leaves.pop(0) if leaves else -1)
            except SlipstreamError as error:
                failed = True
                refuse_illegal(self, error)
                self.world.hits(type(error).__name__)
                if not self._comes_back(error):
                    break
                left = True
            if not left:
                break
            # A client whose front end is gone does not hammer on the door.
            await asyncio.sleep(self.world.loop.delay(max(plan.gap, 0.1 if failed else 0.0)))
            if history.complete:
                break
        history.check_end(failed=failed, abortable=self.world.scoped(plan) in self.world.aborted)

    def _comes_back(self, error: SlipstreamError) -> bool:
        """A front end that went takes nothing with it that is kept elsewhere."""
        lost = error.reason == "ENGINE_DEAD" and not self.world.ended and self.world.front_ends
        again = bool(self.plan.kind == "keep" and self.opened and lost)
        if again:
            self.world.hits("back_after_loss")
        return again

    async def _read(self, history: History, leave_after: int) -> bool:
        """Read one call to its end; whether it left before that."""
        plan, calls = self.plan, self._door()
        history.begin()
        events, began_at = 0, self.world.loop.now
        try:
            async with AsyncExitStack() as held:
                stream = await self._open(calls, history, held)
                self.opened = True
                if leave_after == 0:
                    return True
                async for event in stream:
                    history.took(event, kept=plan.kind == "keep")
                    events += 1
                    if events == leave_after:
                        self.world.hits("left")
                        return True
                    await self._write(events)
                history.ended()
                self.world.hits("complete")
                self.world.note(f"{plan.name} is complete")
                return False
        finally:
            if history.began:
                # The engine counts from when it had told the front end everything, whatever the client has read.
                self.left_at = self.world.loop.now if self.front_end is None else began_at
            if plan.kind == "generate":
                within = 0.0 if self.front_end is None else self.front_end.patience
                self.world.closings.left(history.request_id, within)
            self._leave_door()

    async def _open(self, calls: OpenCalls, history: History, held: AsyncExitStack) -> Any:
        plan = self.plan
        if plan.kind == "keep" and self.opened:
            self.world.note(f"{plan.name} comes back with {history.positions()}")
            stream: Any = await calls.attach(
                plan.asked.request_id, history.positions(), held, incarnation=history.incarnation
            )
            self.world.hits("attached")
        elif plan.kind == "keep":
            stream = await calls.keep(plan.asked, held)
        else:
            stream = await calls.generate(plan.asked, held)
            held.push_async_callback(stream.aclose)
        return stream

    async def _write(self, events: int) -> None:
        """The client takes its time, or all of it: then the write that stands still is given up one day."""
        if events == self.plan.dead_after:
            self.world.hits("dead_reader")
            await asyncio.sleep(5.0)
        elif self.plan.pace:
            await asyncio.sleep(self.world.loop.delay(self.plan.pace))
