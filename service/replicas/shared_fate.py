"""Engines that share experts start together, meet each other, and end together.

Those that start together are a generation, with a port of its own at which they meet. When one of them ends, or cannot
start, the others cannot finish a step any more: the generation is over, all of it is ended, and what starts then is of
the next one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from service.replicas.order import Order
from service.replicas.spawned import ReplicaProcess, Spawn

LOOPBACK: Final = "127.0.0.1"
MOST_IN_VAIN: Final = 3
"""Generations in a row that may be over before all of it serve."""


class SharedFate:
    """Of `count` engines. `end(place)` ends the process at `place` by force."""

    def __init__(self, spawn: Spawn, count: int, end: Callable[[int], None]) -> None:
        self._spawn = spawn
        self._end = end
        self._of = [0] * count
        """By place: the generation of the process that was started there last."""
        self._over = 0
        """The newest generation of which a process has ended."""
        self._lost = 0
        """Generations in a row that are over, since one served."""
        self._listener: socket.socket | None = None
        """Where the first engine of the generation that starts listens, until all of it were started."""

    async def spawn(self, order: Order, sock: socket.socket) -> ReplicaProcess:
        """A `Spawn`: tells the engine where it meets the others of its generation."""
        generation = self._of[order.place] = self._over + 1
        if self._listener is None:
            self._listener = socket.create_server((LOOPBACK, 0))
        # Its own, which stays open until the process has it: the generation may be over meanwhile.
        with self._listener.dup() as listener:
            port, first = listener.getsockname()[1], order.place == 0
            if all(each == generation for each in self._of):
                self.close()
            told = replace(order, port=port, listener=listener.fileno() if first else None)
            process = await self._spawn(told, sock)
        if generation <= self._over:
            # It was not known yet when the others were ended.
            process.kill()
        return process

    def ended(self, place: int) -> None:
        """The process at `place` has ended, or could not start."""
        generation = self._of[place]
        if generation <= self._over:
            return
        self._over = generation
        self._lost += 1
        self.close()
        for other, its in enumerate(self._of):
            if other != place and its == generation:
                self._end(other)

    def all_serve(self) -> None:
        """The generation that started last serves."""
        self._lost = 0

    @property
    def in_vain(self) -> bool:
        """Whether it has been tried often enough to start them all: after the one that served, MOST_IN_VAIN times."""
        return self._lost > MOST_IN_VAIN

    def close(self) -> None:
        """Nothing listens any more for engines that are to be started. Idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
