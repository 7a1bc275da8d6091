"""Logit bias and penalties of one row, by one program, in place, from the device's own record of its tokens.

The row's logits are the scratch in which equal tokens of a row find each other: each token of its history writes its
place over its logit, whichever is last stays, and that place counts them all. So no counts are kept for a vocabulary,
and what is read and written grows with the tokens that the row has. All this is done after the program has saved the
logits, of which it tells the model's own log probability of the token that is drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(512)
"""Biases and tokens of the history that a program handles at a time."""


@triton.jit
def add_biases(row, entries, values, saved, first, end, count, length) -> None:
    """What `core.sampling.penalties.apply_bias` adds to `row`: entries `first` to `end` of all.

    entries: int64[3, count], token, least length and end of each; values: float32[count]; saved: float32[count], which
    gets the logits of before. The sum of a token's biases is made entry by entry, by each of these, so that all of them
    write the same.
    """
    for start in range(first, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < end
        tokens = tl.load(entries + at, mask=inside, other=0)
        tl.store(saved + at, tl.load(row + tokens, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()
    for start in range(first, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < end
        tokens = tl.load(entries + at, mask=inside, other=0)
        sums = tl.load(saved + at, mask=inside, other=0.0)
        for other in range(first, end):
            counts = (length >= tl.load(entries + count + other)) & (length < tl.load(entries + 2 * count + other))
            value = tl.where(counts, tl.load(values + other), 0.0)
            sums = tl.where(tokens == tl.load(entries + other), sums + value, sums)
        tl.store(row + tokens, sums, mask=inside)
    tl.debug_barrier()


@triton.jit
def penalise(row, row_bits, history, scratch, longest, length, prompt, repetition, frequency, presence) -> None:
    """What `core.sampling.penalties.apply_penalties` does to `row`, whose tokens are the first `length` of `history`.

    row_bits: `row` as int32; scratch: int32[3, longest], for the logits of before, for the place that counts each
    token, and for how often it came behind the `prompt` first tokens.
    """
    saved = scratch.to(tl.pointer_type(tl.float32), bitcast=True)
    leaders, seen = scratch + longest, scratch + 2 * longest
    for start in range(0, length, CHUNK):
        places = start + tl.arange(0, CHUNK)
        inside = places < length
        tokens = tl.load(history + places, mask=inside, other=0)
        tl.store(saved + places, tl.load(row + tokens, mask=inside, other=0.0), mask=inside)
        tl.store(seen + places, 0, mask=inside)
    tl.debug_barrier()
    for start in range(0, length, CHUNK):
        places = start + tl.arange(0, CHUNK)
        tokens = tl.load(history + places, mask=places < length, other=0)
        tl.store(row_bits + tokens, places.to(tl.int32), mask=places < length)
    tl.debug_barrier()
    for start in range(0, length, CHUNK):
        places = start + tl.arange(0, CHUNK)
        inside = places < length
        leader = tl.load(row_bits + tl.load(history + places, mask=inside, other=0), mask=inside, other=0)
        tl.store(leaders + places, leader, mask=inside)
        # Whole numbers: the order in which they are added does not matter.
        tl.atomic_add(seen + leader, 1, mask=inside & (places >= prompt), sem="relaxed")
    tl.debug_barrier()
    for start in range(0, length, CHUNK):
        places = start + tl.arange(0, CHUNK)
        inside = places < length
        old = tl.load(saved + places, mask=inside, other=0.0)
        times = tl.load(seen + tl.load(leaders + places, mask=inside, other=0), mask=inside, other=0)
        new = tl.where(old > 0, tl.div_rn(old, repetition), old * repetition)
        new = new - frequency * times.to(tl.float32) - presence * (times > 0).to(tl.float32)
        # Every place of a token has the same number for it.
        tl.store(row + tl.load(history + places, mask=inside, other=0), new, mask=inside)
    tl.debug_barrier()


@triton.jit
def saved_logit(token, value, saved, tokens, first, end) -> tl.tensor:
    """float32: what was `saved` for `token` at one of the places from `first` to `end`, or else `value`.

    tokens: the token of each place. All places of a token have saved the same.
    """
    found = tl.full([CHUNK], float("-inf"), tl.float32)
    matches = tl.zeros([CHUNK], tl.int32)
    for start in range(first, end, CHUNK):
        places = start + tl.arange(0, CHUNK)
        inside = places < end
        same = inside & (tl.load(tokens + places, mask=inside, other=0) == token)
        found = tl.maximum(found, tl.load(saved + places, mask=same, other=float("-inf")))
        matches += same.to(tl.int32)
    return tl.where(tl.sum(matches, 0) > 0, tl.max(found, 0), value)
