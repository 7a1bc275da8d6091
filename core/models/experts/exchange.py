"""What shared experts need of the engines around them; `core.distributed.exchange` has it over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Exchange(Protocol):
    """The engines that share experts. All of them call each method at the same time, and each from one thread."""

    @property
    def rank(self) -> int:
        """This engine's number: it has the rank-th part of the experts."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sizes(self, rows: int) -> list[int]:
        """How many rows each engine brings, this one `rows`."""
        ...

    def gather(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """uint8[sum(sizes), B]: the `rows`, uint8[sizes[rank], B], of all engines, in their order."""
        ...

    def reduce(self, parts: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """[sizes[rank], H]: this engine's rows of the sum of all engines' `parts`, each [sum(sizes), H]."""
        ...

    def most(self, values: Sequence[float]) -> list[float]:
        """Place by place the largest of what all engines have given as `values`."""
        ...
