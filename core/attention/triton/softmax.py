"""Pieces that the attention kernels share: which keys a query sees, what a score becomes, one step of the softmax."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product(a, b) -> tl.tensor:
    """float32 [M, N] of a [M, K] and b [K, N]; float32 operands are not rounded to 19 bits on the way."""
    if INTERPRETED:
        # The interpreter (3.7) would multiply the bit patterns of bfloat16 as integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def first_key(query, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """The oldest key that the query at position `query` sees; the same rule as `AttentionSpan.first_key`."""
    first = query * 0
    if WINDOW > 0:
        first = tl.maximum(first, query - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, query // CHUNK * CHUNK)
    return first


@triton.jit
def scaled(products, scale, softcap, CAPPED: tl.constexpr) -> tl.tensor:
    """float32 [M, N]: scores from the products of queries and keys."""
    scores = products * scale
    if CAPPED:
        # softcap * tanh(scores / softcap); the language has no tanh of its own.
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def softmax_step(
    scores, values, scales, peak, total, acc, SCALED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of scores [M, N] (-inf: hidden) and its values [N, V] to peak, total [M] and acc [M, V].

    SCALED: values are times `scales` [N], powers of two, by which weights are multiplied before they are rounded.

    A row that has seen only hidden keys so far keeps a peak of -inf, and weights of zero.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # 0 instead of -inf: -inf - (-inf) is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp(peak - base)
    weights = tl.exp(scores - base[:, None])
    counted = tl.sum(weights, 1)
    if SCALED:
        weights = weights * scales[None, :]
    acc = acc * decay[:, None] + product(weights.to(values.dtype), values)
    return new_peak, total * decay + counted, acc


@triton.jit
def sunk(acc, peak, total, sink) -> tuple[tl.tensor, tl.tensor]:
    """Acc [M, V] and total [M] as they are when `sink` [M] has taken its share; it has no value of its own."""
    top = tl.maximum(peak, sink)
    decay = tl.exp(peak - top)
    return acc * decay[:, None], total * decay + tl.exp(sink - top)
