"""Plain weights rounded to four bits: per output and group of inputs a scale and a zero, from the weights alone.

A group's range is tried at a few widths, for what is cut off at its ends is gained as finer steps between them, and the
one with the least square error is kept. Figures behind the choices: decision 46.
"""

from __future__ import annotations

import torch

from core.models.quantized.grouped import GroupedWeight, pack_nibbles

GROUP = 128
WIDTHS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Of the range from the smallest to the largest weight of a group."""
TOP = 15
AT_ONCE = 1 << 17
"""Weights that are rounded at a time, so that what is computed on the way stays in a cache."""


@torch.inference_mode()
def round_to_groups(weight: torch.Tensor, size: int = GROUP) -> GroupedWeight:
    """`weight` [N, K] of a float type, K even: zeros whole, scales bfloat16. The last group may be shorter."""
    outputs, inputs = weight.shape
    size = min(size, inputs)
    rows = max(1, AT_ONCE // inputs)
    parts = [_round(weight[first : first + rows].detach().float(), size) for first in range(0, outputs, rows)]
    values, scale, zero = (torch.cat(each) for each in zip(*parts, strict=True))
    return GroupedWeight(values, scale, zero, size)


def _round(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nibbles, scales and zeros of a few outputs."""
    outputs, inputs = weight.shape
    groups = -(-inputs // size)
    # Zeros behind the last input are in the range of every group, which includes 0.
    filled = torch.nn.functional.pad(weight, (0, groups * size - inputs)).view(outputs, groups, size)
    low, high = filled.amin(2).clamp(max=0), filled.amax(2).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    scale, zero = torch.ones_like(low), torch.zeros_like(low)
    for width in WIDTHS:
        step, offset = _step(low * width, high * width)
        error = (_values(filled, step, offset).sub_(offset[..., None]).mul_(step[..., None]) - filled).square_().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = torch.where(better, step, scale), torch.where(better, offset, zero)
    values = _values(filled, scale, zero).view(outputs, -1)[:, :inputs]
    return pack_nibbles(values), scale.bfloat16(), zero.to(torch.int8)


def _step(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, as bfloat16 holds them, and zeros of ranges; a group of nothing but zeros has a scale of 1."""
    step = ((high - low) / TOP).bfloat16().float()
    step = torch.where(step > 0, step, torch.ones_like(step))
    return step, (-low / step).round_().clamp_(0, TOP)


def _values(filled: torch.Tensor, step: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (filled / step[..., None]).add_(zero[..., None]).round_().clamp_(0, TOP)
