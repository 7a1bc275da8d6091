"""A front end of the simulation: both sides of its connection, and what its process does when the engine's goes."""

from __future__ import annotations

import asyncio
import random

from core.errors import Draining, EngineDead
from core.types.plain import to_plain
from service.calls.open_calls import OpenCalls
from service.engine.handle import EngineHandle
from service.frontends.host import FrontEndHost
from service.frontends.remote_desk import RemoteDesk
from service.frontends.remote_engine import RemoteEngine
from service.frontends.wire import Kind
from service.limits.admission import Admission
from tests.proofs.sim.shell.loop import VirtualLoop
from tests.proofs.sim.shell.pipe import connect
from tests.proofs.sim.shell.process import EngineProcess
from tests.proofs.sim.shell.scenario import ShellScenario

FLUSH_SECONDS = 2.0


class FrontEnd:
    """One connection. `host` is the engine's side, `engine` and `calls` are the front end's."""

    def __init__(
        self, number: int, process: EngineProcess, scenario: ShellScenario, loop: VirtualLoop, rng: random.Random
    ) -> None:
        self.name = f"front end {number}"
        self._process, self._rng, self._pipe = process, rng, scenario.pipe
        self.doomed = False
        """Whether the connection was cut, or will be."""
        self.open = 0
        """Calls of clients that are in it."""
        self.host = FrontEndHost(process.handle, process.desk, process.metrics, lambda: None)
        self.engine = RemoteEngine(scenario.max_pending)
        self.ends = connect(loop, self.host.link, self.engine.link, scenario.pipe, rng)
        handle = EngineHandle()
        handle.engine = self.engine
        limit = float("inf") if scenario.max_concurrent is None else scenario.max_concurrent
        self.admission = Admission(limit, max_wait=scenario.admission_wait)
        desk = RemoteDesk(self.engine, limited=bool(scenario.tenants))
        self.calls = OpenCalls(handle, process.config, self.admission, desk, process.metrics)
        self.tasks = [asyncio.create_task(self._closed(), name=f"{self.name}: closing")]
        self.publish(leaving=False)
        self.host.send(Kind.READY, to_plain(process.engine.model_info))

    @property
    def patience(self) -> float:
        """Seconds in which what the front end says now is heard, at most, behind all that it said before."""
        drawn, unread = self._pipe, self.ends[1].unread + 100
        return 0.3 + 4 * drawn.delay * (1 + unread / min(drawn.kernel, drawn.piece / 3))

    def publish(self, *, leaving: bool) -> None:
        """The engine's state, as `service.frontends.group` sends it."""
        handle = self._process.handle
        if self.host.link.full:
            return
        state = {
            "state": handle.state.value,
            "draining": handle.draining,
            "leaving": leaving,
            "live": self._process.engine.live_requests,
            # All of them would be most of the bytes of a run, and nothing here reads them.
            "stats": {"step": handle.stats.step},
        }
        self.host.send(Kind.STATE, state)

    def cut(self) -> None:
        """The connection breaks between two bytes."""
        for end in self.ends:
            end.lose(int(self._rng.random() * (1 + len(end.wire))))
        ends = list(self.ends)
        self._rng.shuffle(ends)
        ends[0].reset()
        if self._rng.random() < 0.5:
            # Else the other end reads what was on its way, and then the end of it.
            ends[1].reset()

    def cut_after(self, more: int) -> None:
        """The connection breaks once either side has sent `more` bytes."""
        for end in self.ends:
            end.breaks_at, end.on_break = end.sent + more, self.cut

    async def _closed(self) -> None:
        """As `service.frontends.process.serve` from where it is told to close."""
        dead = await self.engine.closing
        self.engine.fail_streams(EngineDead("the engine failed") if dead else Draining("the server is shutting down"))
        if not dead:
            patience = FLUSH_SECONDS
            while self.open and patience > 0:
                await asyncio.sleep(0.05)
                patience -= 0.05
        await self.engine.stop()
