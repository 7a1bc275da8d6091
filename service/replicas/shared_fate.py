"""Engines that share experts start together, meet each other, and end together.

Each time all of them start is a generation, with a port of its own at which they meet. When one ends, the others of its
generation cannot finish a step any more: they are ended too, and the next generation starts.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from service.replicas.order import Order
from service.replicas.spawned import ReplicaProcess, Spawn

LOOPBACK: Final = "127.0.0.1"


class SharedFate:
    """Of `count` engines. `end(place)` ends the process at `place` by force."""

    def __init__(self, spawn: Spawn, count: int, end: Callable[[int], None]) -> None:
        self._spawn = spawn
        self._end = end
        self._started = [0] * count
        """By place: how many processes have been started there, the last of them in the generation of that number."""
        self._listeners: dict[int, socket.socket] = {}
        """By generation: where its first engine listens, until all of it have started."""

    async def spawn(self, order: Order, sock: socket.socket) -> ReplicaProcess:
        """A `Spawn`: tells the engine where it meets the others of its generation."""
        self._started[order.place] += 1
        generation = self._started[order.place]
        listener = self._listeners.get(generation)
        if listener is None:
            listener = self._listeners[generation] = socket.create_server((LOOPBACK, 0))
        port, first = listener.getsockname()[1], order.place == 0
        try:
            return await self._spawn(replace(order, port=port, listener=listener.fileno() if first else None), sock)
        finally:
            for past in [each for each in self._listeners if each <= min(self._started)]:
                self._listeners.pop(past).close()

    def close(self) -> None:
        """Nothing is started any more. Idempotent."""
        while self._listeners:
            self._listeners.popitem()[1].close()

    def ended(self, place: int) -> None:
        """The process at `place` has ended, or could not serve."""
        for other, started in enumerate(self._started):
            # One that has started more often is of the generation that follows.
            if other != place and started == self._started[place]:
                self._end(other)
