"""What stands between the two products of an MLP, in one launch: any activation, with a gate beside it or without."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _silu(x) -> tl.tensor:
    return x * tl.sigmoid(x)


@triton.jit
def _gelu(x) -> tl.tensor:
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x) -> tl.tensor:
    # The language has no tanh of its own.
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * inner)


@triton.jit
def _relu(x) -> tl.tensor:
    # Written so that a NaN stays one.
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _relu2(x) -> tl.tensor:
    positive = tl.where(x < 0.0, 0.0, x)
    return positive * positive


GATES: dict[str, Any] = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu, "relu2": _relu2}
"""By the names of `core.models.native.reading.ACTIVATIONS`."""


@triton.jit
def _activate(
    into, out, WIDTH: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Program (row, BLOCK of its elements). How many rows there are is no part of what is compiled."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = into + row * (2 * WIDTH if GATED else WIDTH) + columns
    kind = out.dtype.element_ty
    # Rounded before the product, as the module does.
    opened = ACTIVATION(tl.load(source, mask=inside, other=0.0).to(tl.float32)).to(kind)
    if GATED:
        ups = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
        opened = (opened.to(tl.float32) * ups).to(kind)
    tl.store(out + row * WIDTH + columns, opened, mask=inside)


@torch.library.custom_op("slipstream::activate", mutates_args=("out",))
def activate(into: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    """out [T, I] = the activation of into [T, I]; of its first half times its second if into is [T, 2 I]; T > 0.

    Both contiguous and of one dtype. activation: a name of GATES.
    """
    rows, width = out.shape
    grid = (rows, triton.cdiv(width, BLOCK))
    gated = into.shape[1] == 2 * width
    _activate[grid](into, out, WIDTH=width, GATED=gated, ACTIVATION=GATES[activation], BLOCK=BLOCK)
