"""What stands between two products of a decoder layer, in one pass over each row: norm, add, norm.

What a mixer or an MLP gives is normed where a family has a norm behind it, multiplied, and added to the states; what
reads the states next is normed at once. RMSNorm and its fusion with the residual are as in vLLM's
`fused_add_rms_norm` and Liger; norms behind a product, layer norms and two norms of the same states are beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

THERE, CENTRED, BIASED = 1, 2, 4
"""Bits of the kind of a norm; 0 is none."""


class DeviceNorm(NamedTuple):
    """A norm of rows. A weight narrower than float32 says that a row is rounded to its type before it is multiplied."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    kind: int


@triton.jit
def _normed(values, inside, columns, weight, bias, eps, KIND: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """float32 [BLOCK]: the norm of one row, whose places that are not `inside` are 0."""
    if KIND & 2:
        values = tl.where(inside, values - tl.sum(values, 0) / WIDTH, 0.0)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    normed = scaled.to(weights.dtype).to(tl.float32) * weights.to(tl.float32)
    if KIND & 4:
        normed += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return normed


# fmt: off
@triton.jit
def _add_norm(
    x, first, second, out, read, other, behind_weight, behind_bias, read_weight, read_bias, other_weight, other_bias,
    factor, behind_eps, read_eps, other_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr, BEHIND: tl.constexpr, READ: tl.constexpr,
    OTHER: tl.constexpr,
) -> None:
    # fmt: on
    """Program: one row. Rounded wherever the modules of a layer hand a tensor on."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row + columns, mask=inside, other=0.0)
    kind = values.dtype
    values = values.to(tl.float32)
    if ADDED:
        added = tl.load(first + row + columns, mask=inside, other=0.0).to(tl.float32)
        if BEHIND:
            added = _normed(added, inside, columns, behind_weight, behind_bias, behind_eps, BEHIND, WIDTH)
            added = added.to(kind).to(tl.float32)
        added = (added * factor).to(kind).to(tl.float32)
        if ADDED == 2:
            more = tl.load(second + row + columns, mask=inside, other=0.0).to(tl.float32)
            more = (more * factor).to(kind).to(tl.float32)
            added = (added + more).to(kind).to(tl.float32)
        values = (values + added).to(kind)
        tl.store(out + row + columns, values, mask=inside)
        values = values.to(tl.float32)
    if READ:
        normed = _normed(values, inside, columns, read_weight, read_bias, read_eps, READ, WIDTH)
        tl.store(read + row + columns, normed.to(kind), mask=inside)
    if OTHER:
        normed = _normed(values, inside, columns, other_weight, other_bias, other_eps, OTHER, WIDTH)
        tl.store(other + row + columns, normed.to(kind), mask=inside)


@torch.library.custom_op("slipstream::add_norm", mutates_args=("out", "read", "other"))
def add_norm(
    x: torch.Tensor,
    added: list[torch.Tensor],
    out: torch.Tensor | None,
    read: torch.Tensor | None,
    other: torch.Tensor | None,
    weights: list[torch.Tensor],
    eps: list[float],
    kinds: list[int],
    factor: float,
) -> None:
    """out = x + factor · (the norm behind of added[0], and added[1]); read and other = norms of out, or of x.

    All of them [T, C], contiguous, of x's dtype, T > 0; added has two tensors at most, and without any there is no
    `out`. weights, eps, kinds: of the norm behind, of that of `read`, of that of `other`, as `norms_of` has them.
    An operator, not a plain launch, so that whatever watches the dispatcher sees what it reads and writes.
    """
    rows, width = x.shape
    given = [*added, x, x][:2]
    outs = [x if each is None else each for each in (out, read, other)]
    block = triton.next_power_of_2(width)
    # fmt: off
    _add_norm[(rows,)](
        x, *given, *outs, *weights, factor, *eps,
        WIDTH=width, BLOCK=block, ADDED=len(added), BEHIND=kinds[0], READ=kinds[1], OTHER=kinds[2],
        num_warps=warps_of(block),
    )
    # fmt: on


def warps_of(block: int) -> int:
    """Warps for a row of `block` elements, or of so many at most: some dozen elements for each thread."""
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


def norms_of(x: torch.Tensor, *norms: DeviceNorm | None) -> tuple[list[torch.Tensor], list[float], list[int]]:
    """Weights and biases by turns, eps and kinds of `norms`; `x` stands where there is none, and is not read."""
    found = [DeviceNorm(x, x, 0.0, 0) if norm is None else norm for norm in norms]
    tensors = [tensor for norm in found for tensor in (norm.weight, norm.weight if norm.bias is None else norm.bias)]
    return tensors, [norm.eps for norm in found], [norm.kind for norm in found]


class Sums(NamedTuple):
    """States of all tokens, [T, C], and what reads them."""

    states: torch.Tensor
    read: torch.Tensor
    """Normed, or the states themselves where nothing norms them."""
    other: torch.Tensor
    """Normed by the second norm; else as `read`."""


def add_and_norm(
    x: torch.Tensor,
    added: list[torch.Tensor],
    behind: DeviceNorm | None,
    factor: float,
    norm: DeviceNorm | None,
    second: DeviceNorm | None = None,
) -> Sums:
    """`add_norm` into new memory, in one launch; in none where there is nothing to add and no norm."""
    assert behind is None or len(added) == 1, "what two add has no norm behind it"
    out = torch.empty_like(x) if added else None
    read, other = (None if each is None else torch.empty_like(x) for each in (norm, second))
    if added or norm or second:
        add_norm(x, added, out, read, other, *norms_of(x, behind, norm, second), factor)
    states = x if out is None else out
    normed = states if read is None else read
    return Sums(states, normed, normed if other is None else other)
