"""What lies at and above a key in one row, and the largest key above which enough lies: top-k and top-p.

A radix select, two bits a pass, over the ordered 32-bit keys. Histograms of more bits need fewer passes (Alabi et al.
2012), but one of weights would be made by 64-bit atomics, nearly all of them on the few exponents that logits have.
Three thresholds at a time need three sums in registers, and a row stays in the L2 cache from pass to pass. Sums are
whole numbers: neither their order, nor which thresholds were tried, nor how many, is seen in what is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from core.sampling.triton.reads import keyed, ordered, read_block, weigh

_BINADE = tl.constexpr(1 << 23)
"""Keys from a power of two to the next."""


@triton.jit
def mass_from(row, words, masked, vocab, temperature, top, key, BITS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """int64: the weight of all tokens of one row whose keys are at least `key`, int32."""
    acc = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        scaled = read_block(row, words, masked, start, vocab, temperature, BLOCK)
        acc += tl.where(ordered(scaled) >= key, weigh(scaled, top, BITS), 0)
    return tl.sum(acc, 0)


@triton.jit
def _thresholds(low, high) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """int64, rising: three keys strictly between `low` and `high`, which are not neighbours.

    Quarters of the keys, once those are of about one size. Before that most keys are those of numbers next to zero, and
    most logits are not: the middle of the keys, and two places of the values. So there are at most 9 passes with those,
    whose keys are halved each time, and 12 with quarters.
    """
    step = (high - low + 3) // 4
    bottom, ceiling = keyed(low.to(tl.int32)), keyed(high.to(tl.int32))
    middle = low + (high - low) // 2
    half = ordered(bottom * 0.5 + ceiling * 0.5).to(tl.int64)
    above = tl.maximum(half, ordered(bottom * 0.25 + ceiling * 0.75).to(tl.int64))
    is_even = high - low <= _BINADE
    first = tl.where(is_even, low + step, tl.minimum(middle, half))
    second = tl.where(is_even, low + 2 * step, tl.maximum(tl.minimum(middle, above), half))
    third = tl.where(is_even, low + 3 * step, tl.maximum(middle, above))
    least, most = low + 1, high - 1
    first, second = tl.maximum(tl.minimum(first, most), least), tl.maximum(tl.minimum(second, most), least)
    return first, second, tl.maximum(tl.minimum(third, most), least)


@triton.jit
def _least_weight(key, top, BITS: tl.constexpr) -> tl.tensor:
    """int64: no token at or above `key`, int64, weighs less. Weights rise with the logit but for their last bits."""
    weight = weigh(keyed(key.to(tl.int32)), top, BITS)
    return weight - (weight >> 10) - 1


# fmt: off
@triton.jit
def largest_key(
    row, words, masked, vocab, temperature, top, low, high, least,
    WEIGHED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:
    # fmt: on
    """int64: a key t >= `low` such that {key >= t} is {key >= the largest key above which `least` lies}.

    What lies there are tokens, or their weights if WEIGHED. `low`, `high`, `least`: int64; `least`, which is positive,
    lies above `low`, or `low` is the answer; above `high` lies nothing.
    """
    at_low, at_high = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64), tl.full([], 0, tl.int64)
    unit = tl.full([], 1, tl.int64)
    # Ended where a larger key would leave out too much: at exactly `least`, or with one token between low and high.
    while (high - low > 1) & (at_low != least) & (at_low - at_high >= 2 * unit):
        first, second, third = _thresholds(low, high)
        key_1, key_2, key_3 = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
        above_1 = tl.zeros([BLOCK], tl.int64)
        above_2 = tl.zeros([BLOCK], tl.int64)
        above_3 = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            scaled = read_block(row, words, masked, start, vocab, temperature, BLOCK)
            keys = ordered(scaled)
            if WEIGHED:
                each = weigh(scaled, top, BITS)
            else:
                each = tl.full([BLOCK], 1, tl.int64)
            above_1 += tl.where(keys >= key_1, each, 0)
            above_2 += tl.where(keys >= key_2, each, 0)
            above_3 += tl.where(keys >= key_3, each, 0)
        mass_1, mass_2, mass_3 = tl.sum(above_1, 0), tl.sum(above_2, 0), tl.sum(above_3, 0)
        # They fall from the first to the third: below the last that is enough, and above the first that is not.
        high = tl.where(mass_1 < least, first, tl.where(mass_2 < least, second, tl.where(mass_3 < least, third, high)))
        at_high = tl.where(
            mass_1 < least, mass_1, tl.where(mass_2 < least, mass_2, tl.where(mass_3 < least, mass_3, at_high))
        )
        low = tl.where(mass_3 >= least, third, tl.where(mass_2 >= least, second, tl.where(mass_1 >= least, first, low)))
        at_low = tl.where(
            mass_3 >= least, mass_3, tl.where(mass_2 >= least, mass_2, tl.where(mass_1 >= least, mass_1, at_low))
        )
        if WEIGHED:
            unit = tl.maximum(_least_weight(low, top, BITS), 1)
    return low
