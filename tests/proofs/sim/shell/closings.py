"""When the engine lets go of a request: not long after its reader left or its abort was answered, and with its hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.engine.api import EngineState
from core.engine.streams.token_stream import TokenStream
from tests.proofs.sim.story import Violation

if TYPE_CHECKING:
    from tests.proofs.sim.shell.process import EngineProcess
    from tests.proofs.sim.shell.world import ShellWorld

NEAR = 0.15
"""Seconds that the engine may go on with a request that nothing wants: what callbacks are held up for."""


class Closings:
    """Stands where the engine is told that a stream is over. `left` and `aborted` are told by the clients."""

    def __init__(self, world: ShellWorld, process: EngineProcess) -> None:
        self._world, self._process = world, process
        self._unwanted: dict[str, tuple[float, str]] = {}
        closed = process.engine._outputs._on_closed

        def watched(stream: TokenStream) -> None:
            closed(stream)
            try:
                self._look(stream)
            except Violation as violation:
                world.blame(violation)

        process.engine._outputs._on_closed = watched

    def left(self, request_id: str, within: float) -> None:
        """The only reader of a request is gone, which the engine's process hears `within` seconds."""
        self._unwanted.setdefault(request_id, (self._world.loop.now + within + NEAR, "no_reader"))

    def aborted(self, request_id: str) -> None:
        """A caller was told that the request was there to be ended."""
        self._unwanted[request_id] = (self._world.loop.now + NEAR, "abort_ignored")

    def _look(self, stream: TokenStream) -> None:
        due, oracle = self._unwanted.get(stream.request_id, (float("inf"), ""))
        now, shared = self._world.loop.now, self._world.ids[stream.request_id] > 1
        # One that is dead or hangs ends no stream in time.
        if now > due and not shared and self._process.engine.state is EngineState.READY and not self._world.ended:
            raise Violation(oracle, f"{stream.request_id!r} went on for {now - due:.3f} s longer than it may")
        for kept in self._process.retention._kept.values():
            if kept._stream is stream and kept._hold._leave is not None:
                raise Violation("hold_past_end", f"{stream.request_id!r} is over, and still has its tenant's place")
