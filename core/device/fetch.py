"""Tensors of a device on their way to the host: all of a step's in one transfer.

A copy of a few bytes takes the host some microseconds to submit, and the caching allocator an event for the pinned
block of each. A step has three to seven such tensors. They are laid end to end on the device, by one kernel on the
stream of the copies, where no forward pass waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def fetch_together(tensors: Sequence[torch.Tensor], new_host: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Views, in the order, dtypes and shapes of `tensors`, of one host tensor that a transfer fills without a wait.

    `new_host`: makes uint8[n] on the host, which begins at a multiple of 8.
    """
    if not tensors:
        return []
    # Those of large elements first, so that each begins at a multiple of its own.
    order = sorted(range(len(tensors)), key=lambda place: -tensors[place].element_size())
    parts = [tensors[place].contiguous().view(-1).view(torch.uint8) for place in order]
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    host = new_host(len(packed))
    host.copy_(packed, non_blocking=True)
    views = dict(zip(order, host.split([len(part) for part in parts]), strict=True))
    return [views[place].view(each.dtype).view(each.shape) for place, each in enumerate(tensors)]
