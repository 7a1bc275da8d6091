"""Tells engines that share experts that one of them begins a step, in which all have to take part.

Steps are numbered alike in all engines. The one that begins a step rings for its number, and then waits in its first
layer of experts; an engine that hears of a step that it has not begun takes part in it, without rows of its own. No
engine leads, and while none has work none does anything. In vLLM a coordinator process starts and ends "waves", in
which idle engines run dummy steps all the time; SGLang's idle ranks ask each other in a loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from core.distributed.world import World

LEFT: Final = -1
"""Stands for the number of a step: this engine will begin none any more."""
LEAVE_SECONDS: Final = 5.0
"""Seconds in which the others have heard that this one leaves."""
MOST_SENT: Final = 8
"""Messages to one engine that are kept for their transfers."""


class Bells:
    """One engine's: `ring` and `leave` belong to the thread that runs its steps."""

    def __init__(self, world: World) -> None:
        """All engines make theirs at the same time."""
        self.others = [rank for rank in range(world.size) if rank != world.rank]
        # Of its own: it waits while collectives run.
        self._group = world.group(backend="gloo")
        self._rung = dict.fromkeys(self.others, LEFT)
        """The last step that each of the others has rung for."""
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def listen(self, heard: Callable[[int, int], None], lost: Callable[[BaseException], None]) -> None:
        """Begin to hear the others, each on a thread of its own.

        `heard(rank, step)`: an engine has begun step `step`, or LEFT. `lost(error)`: it is gone, and had not left.
        """
        for rank in self.others:
            threading.Thread(
                target=self._hear, args=(rank, heard, lost), name=f"slipstream-bell-{rank}", daemon=True
            ).start()

    def ring(self, step: int) -> None:
        """Have all others take part in `step`. Waits for none. Raises RuntimeError once one is gone."""
        for rank in self.others:
            # One that has rung for it waits in it already.
            if self._rung[rank] < step:
                self._send(rank, step)

    def leave(self) -> None:
        """Tell the others that no step of this engine will follow, and wait until they have heard it.

        Raises RuntimeError once one is gone, or has not heard it in LEAVE_SECONDS.
        """
        for rank in self.others:
            self._send(rank, LEFT)
        while self._sent:
            self._sent.popleft()[0].wait(timedelta(seconds=LEAVE_SECONDS))

    def _send(self, rank: int, step: int) -> None:
        told = torch.tensor([step])
        self._sent.append((dist.isend(told, rank, group=self._group), told))
        while len(self._sent) > MOST_SENT * len(self.others):
            self._sent.popleft()[0].wait()

    def _hear(self, rank: int, heard: Callable[[int, int], None], lost: Callable[[BaseException], None]) -> None:
        told = torch.zeros(1, dtype=torch.int64)
        step = 0
        try:
            while step != LEFT:
                dist.recv(told, rank, group=self._group)
                step = int(told)
                if step != LEFT:
                    self._rung[rank] = step
                heard(rank, step)
        except BaseException as error:
            lost(error)
