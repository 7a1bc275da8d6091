"""Blocks of one row's logits as a draw reads them: masked, over temperature, with their ordered keys and weights.

Nothing of that is written back. A row stays as the model and the changes of its options left it, and what is computed
again in each pass over it is cheaper than another [S, V] copy in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from core.sampling.draw import FAINTEST, LOG2_E, SERIES

_LOG2_E = tl.constexpr(LOG2_E)
_FAINTEST = tl.constexpr(FAINTEST)
_C7, _C6, _C5, _C4, _C3, _C2, _C1 = (tl.constexpr(factor) for factor in SERIES)


@triton.jit
def read_block(row, words, masked, start, vocab, temperature, BLOCK: tl.constexpr) -> tl.tensor:
    """float32 [BLOCK]: the logits from `start` on over `temperature`, -inf where the bits of `words` forbid a token.

    Only where `masked` are bits read, 32 tokens a word. A NaN stays NaN, and fails its row as it does without a mask.
    """
    ids = start + tl.arange(0, BLOCK)
    inside = ids < vocab
    values = tl.load(row + ids, mask=inside, other=float("-inf"))
    bits = tl.load(words + ids // 32, mask=inside & masked, other=-1)
    allowed = ((bits >> (ids % 32)) & 1) != 0
    # Not `/`, which is quicker and may be off by two last bits.
    return tl.div_rn(tl.where(allowed | (values != values), values, float("-inf")), temperature)


@triton.jit
def ordered(values) -> tl.tensor:
    """int32 of the same shape: `core.sampling.cutoff.ordered_keys`."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def keyed(keys) -> tl.tensor:
    """float32 of the same shape: the values of `ordered` keys, int32."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(scaled, top, BITS: tl.constexpr) -> tl.tensor:
    """int64 of the same shape: the weights of `core.sampling.draw.weigh_by_exp`, bit for bit.

    scaled: float32, none of it NaN or above `top`, the row's largest, which is finite; BITS: `weight_bits` of the row.
    Sums and products must not be fused (`enable_fp_fusion=False`): a fused one rounds once where two round twice.
    """
    powers = tl.maximum((scaled - top) * _LOG2_E, _FAINTEST)
    whole = tl.floor(powers + 0.5)
    rest = powers - whole
    shares = (((((rest * _C7 + _C6) * rest + _C5) * rest + _C4) * rest + _C3) * rest + _C2) * rest
    shares = (shares + _C1) * rest + 1.0
    exponents = tl.maximum(whole + BITS, -2.0).to(tl.int32)
    scale = ((exponents + 127) << 23).to(tl.float32, bitcast=True)
    # Towards zero is down here. Sums of int64 are exact, and quick also where float64 is not.
    return (shares * scale).to(tl.int64)
