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
        told = torch.empty(self.size, dtype=torch.int64)
        _all_gather(told, torch.tensor([rows]))
        sizes: list[int] = told.tolist()
        return sizes

    def gather(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See `Exchange`."""
        most = max(sizes)
        everything = rows.new_empty(self.size * most, rows.shape[1])
        _all_gather(everything, _padded(rows, most))
        if min(sizes) == most:
            return everything
        return torch.cat([part[:count] for part, count in zip(everything.split(most), sizes, strict=True)])

    def reduce(self, parts: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See `Exchange`."""
        most = max(sizes)
        if min(sizes) != most:
            parts = torch.cat([_padded(part, most) for part in parts.split(list(sizes))])
        own = parts.new_empty(most, parts.shape[1])
        _reduce_scatter(own, parts.contiguous())
        return own[: sizes[self.rank]]

    def most(self, values: Sequence[float]) -> list[float]:
        """See `Exchange`."""
        told = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        found: list[float] = told.tolist()
        return found


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`rows`, and behind them as many zeros as make `count` rows."""
    return torch.nn.functional.pad(rows, (0, 0, 0, count - rows.shape[0])).contiguous()
