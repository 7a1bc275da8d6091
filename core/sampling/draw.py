"""One token per row by inverse CDF, in vocabulary order and in exact arithmetic.

Probabilities become whole numbers held in floating point, scaled so that a row's total stays below 2^53. Sums of whole
numbers do not depend on the order of the additions, so a row's result depends neither on its neighbours, nor on how a
kernel splits its work, nor on whether the dropped tokens take part as zeros or not at all. That is what makes law 13
hold bit for bit: a float32 `sum` differs between one row and two when PyTorch splits a single long row over threads.
"""

from __future__ import annotations

import math
from typing import Final

import torch

BLOCK: Final = 128
"""Tokens per block of the two-level CDF. `padded` rows are a whole number of blocks long."""
LOG2_E: Final = math.log2(math.e)
FAINTEST: Final = -64.0
"""Binary logarithms of shares end here: 2^-64 of the most likely token's weight is no whole token in any vocabulary."""
DEGREE: Final = 7
SERIES: Final = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(DEGREE, 0, -1))
"""Taylor's series of 2^x without its 1, highest power first: off by 6e-9 at one half, a tenth of float32's rounding."""


def padded(logits: torch.Tensor) -> torch.Tensor:
    """float32[n, V] -> float32[n, W] with W the next multiple of BLOCK; the new columns are -inf, so weigh nothing."""
    missing = -logits.shape[1] % BLOCK
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def weigh(scaled: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    """float32[n, W] of whole numbers proportional to exp(scaled); each row's exact total is below 2^53.

    scaled: float32[n, W], logits over temperature; tops: float32[n], its row maxima. Never modifies its arguments.
    """
    # The CPU's softmax computes one row after another, so a row does not depend on the others. For the elementwise exp
    # that holds only if the vector library treats the tail of a buffer like its middle.
    return weigh_by_softmax(scaled) if scaled.device.type == "cpu" else weigh_by_exp(scaled, tops)


def weigh_by_softmax(scaled: torch.Tensor) -> torch.Tensor:
    """Weights out of 2^50, to within the rounding of the softmax (the CPU's way)."""
    return scaled.softmax(-1).mul_(2.0**50).floor_()


def weigh_by_exp(scaled: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    """Weights relative to the most likely token's (for other devices: elementwise, so rows are independent).

    Sums and products of float32 that every device rounds alike, so that our own kernels (`core.sampling.triton`) weigh
    tokens as this does, bit for bit. Libraries' exponentials differ in last bits between devices and versions.
    """
    powers = scaled.sub(tops[:, None]).mul_(LOG2_E).clamp_min_(FAINTEST)
    whole = powers.add(0.5).floor_()
    rest = powers.sub_(whole)
    shares = rest * SERIES[0]
    for factor in SERIES[1:]:
        shares.add_(factor).mul_(rest)
    # 2^exponent as float32, put together from its bits; below 2^-2 the floor is 0 in any case.
    exponents = whole.add_(weight_bits(scaled.shape[1])).clamp_min_(-2.0).to(torch.int32)
    return shares.add_(1.0).mul_(exponents.add_(127).bitwise_left_shift_(23).view(torch.float32)).floor_()


def weight_bits(width: int) -> int:
    """The most likely of `width` tokens weighs 2 to the power of this, so that they weigh less than 2^53 together."""
    return 52 - (width - 1).bit_length()


def totals(weights: torch.Tensor) -> torch.Tensor:
    """Exact float64[n] row sums of float32[n, W] weights."""
    return _block_sums(weights).sum(-1)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids int64[n]: in each row the first id whose cumulative weight exceeds uniform * total.

    weights: float32[n, W] as `weigh` returns them, dropped tokens 0; uniforms: float64[n] in [0, 1). A token of weight
    0 is never returned. Rows without any weight, or with NaN, give some id within [0, W) that means nothing.
    """
    block_cdf = _block_sums(weights).cumsum(-1)
    target = _targets(block_cdf[:, -1], uniforms)
    block = _first_above(block_cdf, target)
    before = block_cdf.gather(1, (block - 1).clamp_min_(0)[:, None])[:, 0] * (block > 0)
    blocks = weights.view(len(weights), -1, BLOCK)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
    return block * BLOCK + _first_above(inside, target - before)


def draw_among(ids: torch.Tensor, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Exactly what `draw` returns, when all tokens of non-zero weight are among `ids`.

    ids: int64[n, K] without duplicates in a row, in any order; weights: float64[n, K] whole numbers.
    """
    ids, order = ids.sort(-1)
    cdf = weights.gather(1, order).cumsum(-1)
    place = _first_above(cdf, _targets(cdf[:, -1], uniforms))
    return ids.gather(1, place[:, None])[:, 0]


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of each block, float64[n, W / BLOCK]."""
    blocks = weights.view(len(weights), -1, BLOCK)
    # The CPU has no vectorised reduction that widens on the way; widening first is faster.
    return blocks.double().sum(-1) if weights.device.type == "cpu" else blocks.sum(-1, dtype=torch.float64)


def _targets(total: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Whole numbers in [0, total - 1]: u * total may round up to total, beyond which there is no token."""
    return torch.minimum((uniforms * total).floor_(), total - 1).clamp_min_(0)


def _first_above(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First column of ascending float64[n, m] that is above target[n]; the last column where there is none."""
    found = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
    return found.clamp_max_(cdf.shape[1] - 1)
