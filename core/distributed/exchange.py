"""What engines that share experts exchange in each of their layers, over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from core.distributed.world import World

# Since PyTorch 2.13 by other names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class DistributedExchange:
    """See `core.models.experts.exchange`."""

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.size = world.size

    def sizes(self, rows: int) -> list[int]:
        """See `Exchange`. By hosts: what is allocated on the devices depends on them."""
        told = self._gathered(torch.tensor([[rows]]))
        sizes: list[int] = told.flatten().tolist()
        return sizes

    def gather(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See `Exchange`."""
        most = max(sizes)
        everything = self._gathered(_padded(rows, most))
        if min(sizes) == most:
            return everything
        return torch.cat([part[:count] for part, count in zip(everything.split(most), sizes, strict=True)])

    def reduce(self, parts: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See `Exchange`."""
        most = max(sizes)
        if min(sizes) != most:
            parts = torch.cat([_padded(part, most) for part in parts.split(list(sizes))])
        return self._reduced(parts.contiguous())[: sizes[self.rank]]

    def most(self, values: Sequence[float]) -> list[float]:
        """See `Exchange`."""
        told = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        found: list[float] = told.tolist()
        return found

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """[size * n, ...]: the `rows`, [n, ...] and as many everywhere, of all."""
        everything = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        if rows.is_cuda:
            _all_gather(everything, rows)
        else:
            # Gloo's other collectives go round in several turns: between two processes a gather takes twice as long as
            # this, and a reduction five times (0.23 beside 0.5 and 1.2 ms for a row of 2 KiB, on two cores).
            dist.all_to_all_single(everything, rows.repeat(self.size, *[1] * (rows.dim() - 1)))
        return everything

    def _reduced(self, parts: torch.Tensor) -> torch.Tensor:
        """[n, ...]: this engine's part of the sum of all engines' `parts`, [size * n, ...]."""
        if parts.is_cuda:
            own = parts.new_empty(parts.shape[0] // self.size, *parts.shape[1:])
            _reduce_scatter(own, parts)
            return own
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received.view(self.size, -1, *parts.shape[1:]).sum(0)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`rows`, and behind them as many zeros as make `count` rows."""
    return torch.nn.functional.pad(rows, (0, 0, 0, count - rows.shape[0])).contiguous()
