"""What a stage needs of the ranks around it; `core.distributed.ring` has it over torch.distributed."""

from __future__ import annotations

from typing import Protocol

import torch


class Coming(Protocol):
    """A tensor that is on its way here."""

    def wait(self) -> torch.Tensor:
        """The tensor; blocks until it is here. Raises RuntimeError once the rank that sends it is gone."""
        ...


class Ring(Protocol):
    """The ranks of one pipeline: each hands on to the next, and the last one to the first. One thread at a time."""

    @property
    def rank(self) -> int:
        """This rank: 0 has the first layers."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def send(self, tensor: torch.Tensor) -> None:
        """Have the next rank get `tensor`, which must not change any more. Never waits for that rank."""
        ...

    def expect(self, into: torch.Tensor) -> Coming:
        """What the rank before sends next; it will be in `into`, contiguous, of its shape and dtype."""
        ...

    def agree(self, values: list[float]) -> list[float]:
        """What rank 0 has given as `values`, on every rank; all call it at the same time."""
        ...

    def all_equal(self, value: int) -> bool:
        """Whether all ranks have given the same `value`, below 2 ** 63; all call it at the same time."""
        ...
