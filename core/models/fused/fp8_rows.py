"""Rows rounded to eight-bit floats with a scale each, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.attention.triton.e4m3 import encode

BLOCK = 2048
"""Numbers that a program reads at a time."""


@triton.jit
def _round_row(
    rows, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr
) -> None:
    """Program: one row, read twice; the second time it comes from a cache."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(rows + row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), LARGEST), LEAST)
    tl.store(scales + tl.program_id(0), scale)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(rows + row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        quotients = tl.div_rn(values, scale)
        bounded = tl.minimum(tl.maximum(quotients, -LARGEST), LARGEST)
        # What is no number stays none, so that its row fails.
        bounded = tl.where(quotients != quotients, quotients, bounded)
        tl.store(out + row + columns, encode(bounded), mask=columns < WIDTH)


@torch.library.custom_op("slipstream::round_rows", mutates_args=())
def round_rows_at_once(rows: torch.Tensor, largest: float, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What `core.models.quantized.fp8.round_rows` makes of `rows` [T, K], K above 0: `largest` times the scale is a
    row's largest number, unless the scale would be below `least`.
    """
    dense = rows.contiguous()
    count, width = dense.shape
    out = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=rows.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    _round_row[(count,)](dense, out.view(torch.uint8), scales, WIDTH=width, BLOCK=block, LARGEST=largest, LEAST=least)
    return out, scales
