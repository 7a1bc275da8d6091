"""The ranks of a pipeline, over torch.distributed: hidden states go from each to the next, and back to the first.

Two process groups, onward and home. NCCL does the transfers of one group in order: one that waits for the last rank
would hold up those that the first rank has still to send, and two stages would take turns where they could work at
once. The idea of a group for each direction is Megatron-LM's.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch
import torch.distributed as dist

from core.distributed.meeting import LEADER
from core.distributed.world import World

MOST_SENT: Final = 8
"""Tensors that are kept for their transfers; by then the oldest has long been received."""


class Arriving:
    """A tensor that is received."""

    def __init__(self, tensor: torch.Tensor, work: Any) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> torch.Tensor:
        """See `Coming`."""
        self._work.wait()
        return self._tensor


class DistributedRing:
    """See `core.models.stages.ring`."""

    def __init__(self, world: World) -> None:
        """All ranks of `world` make theirs at the same time."""
        self.rank = world.rank
        self.size = world.size
        self._onward, self._home = world.group(), world.group()
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """See `Ring`."""
        to = (self.rank + 1) % self.size
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, to, group=self._home if to == LEADER else self._onward), tensor))
        if len(self._sent) > MOST_SENT:
            self._sent.popleft()[0].wait()

    def expect(self, into: torch.Tensor) -> Arriving:
        """See `Ring`."""
        sender, group = (self.rank - 1) % self.size, self._home if self.rank == LEADER else self._onward
        return Arriving(into, dist.irecv(into, sender, group=group))

    def agree(self, values: list[float]) -> list[float]:
        """See `Ring`."""
        told = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(told, LEADER)
        agreed: list[float] = told.tolist()
        return agreed

    def all_equal(self, value: int) -> bool:
        """See `Ring`."""
        ends = torch.tensor([value, -value])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        return bool(ends[0] == -ends[1])
