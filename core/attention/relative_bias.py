"""What attention adds to a score by how far a key stands behind its query: T5's relative positions, in a decoder.

T5 finds a bucket for each pair of places, by logarithms, and looks its bias up. A decoder's query sees nothing ahead of
itself, and from some distance on all keys share a bucket, so one short table says it all. A kernel reads it by the
distances that it finds, also in a captured step, whose places the host does not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias:
    """Bias by distance. `table`: float32[D, H], contiguous, D >= 2: entry d for a key d tokens behind its query, the
    last one for every key farther behind too.
    """

    table: torch.Tensor

    def __post_init__(self) -> None:
        assert self.table.dtype == torch.float32 and self.table.is_contiguous(), self.table.dtype
        assert self.table.dim() == 2 and len(self.table) > 1, self.table.shape

    @property
    def farthest(self) -> int:
        """The distance from which on the bias stays the same."""
        return len(self.table) - 1

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """float32 [*S, H] of positions, int64, that broadcast to a shape S. What is ahead of a query means nothing."""
        return self.table[(queries - keys).clamp(0, self.farthest)]
