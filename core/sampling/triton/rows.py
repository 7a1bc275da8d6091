"""One program a row: bias, penalties, mask, temperature, filters, the draw, and the log probability of what it drew.

Which of them a row has is told by its options on the device. So a step is one launch of the one kernel that there is,
whatever mix of options its rows have, and greedy rows are its first pass over the logits and nothing else.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from core.sampling.draw import BLOCK as PADDING
from core.sampling.draw import weight_bits
from core.sampling.triton.changes import add_biases, penalise, saved_logit
from core.sampling.triton.options import Float, Whole
from core.sampling.triton.reads import ordered, read_block, weigh
from core.sampling.triton.search import largest_key, mass_from

BLOCK: Final = 1024
"""Logits that a program reads at a time: four by each thread, whose sums leave registers for two programs at once."""
WARPS: Final = 8

_FLOOR, _REPETITION = tl.constexpr(Float.FLOOR), tl.constexpr(Float.REPETITION)
_FREQUENCY, _PRESENCE = tl.constexpr(Float.FREQUENCY), tl.constexpr(Float.PRESENCE)
_TOP_K, _ROW, _PROMPT = tl.constexpr(Whole.TOP_K), tl.constexpr(Whole.ROW), tl.constexpr(Whole.PROMPT)
_SLOT, _MASK = tl.constexpr(Whole.SLOT), tl.constexpr(Whole.MASK)
_BIAS_FROM, _BIAS_END = tl.constexpr(Whole.BIAS_FROM), tl.constexpr(Whole.BIAS_END)
_BELOW = tl.constexpr(45.0)
"""Tokens this far below the row's largest scaled logit weigh nothing: e^45 is above 2^64."""


@triton.jit
def _peak_of(row, words, masked, vocab, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A row's largest logit, the least of the ids int64 that have it, its lowest but -inf, and whether it has a NaN."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.arange(0, BLOCK)
    worst = tl.full([BLOCK], float("inf"), tl.float32)
    strange = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        values = read_block(row, words, masked, start, vocab, 1.0, BLOCK)
        where = tl.where(values > best, start + tl.arange(0, BLOCK), where)
        best = tl.maximum(best, values)
        worst = tl.minimum(worst, tl.where(values > float("-inf"), values, float("inf")))
        strange |= (values != values).to(tl.int32)
    peak = tl.max(best, 0)
    first = tl.min(tl.where(best == peak, where, 0x7FFFFFFF), 0)
    return peak, first.to(tl.int64), tl.min(worst, 0), tl.max(strange, 0) != 0


# fmt: off
@triton.jit
def _cutoff(
    row, words, masked, vocab, temperature, top, bottom, top_k, top_p, floor, BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:
    # fmt: on
    """int64: a key at and above which a row's filters keep its tokens. What is off costs nothing.

    top, bottom: the largest and the lowest scaled logit of the row but -inf, whose tokens weigh nothing anyway.
    """
    cut = ordered(top + floor).to(tl.int64)
    high = ordered(top).to(tl.int64) + 1
    k_key = ordered(bottom).to(tl.int64)
    if top_k > 0:
        k_key = largest_key(row, words, masked, vocab, temperature, top, k_key, high, top_k, False, BITS, BLOCK)
        cut = tl.maximum(cut, k_key)
    if top_p < 1.0:
        # Top-p counts what top-k left as the whole; what min-p leaves out counts in it.
        whole = mass_from(row, words, masked, vocab, temperature, top, k_key.to(tl.int32), BITS, BLOCK)
        need = tl.maximum(tl.ceil(top_p * whole.to(tl.float64)).to(tl.int64), 1)
        cut = tl.maximum(cut, tl.minimum(ordered(top - _BELOW).to(tl.int64), high - 1))
        cut = largest_key(row, words, masked, vocab, temperature, top, cut, high, need, True, BITS, BLOCK)
    return cut


# fmt: off
@triton.jit
def _drawn(
    row, words, masked, vocab, temperature, top, key, uniform, BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:
    # fmt: on
    """int64: the first id whose cumulative weight, of tokens with at least `key`, exceeds uniform x total."""
    total = mass_from(row, words, masked, vocab, temperature, top, key, BITS, BLOCK)
    target = tl.floor(uniform * total.to(tl.float64)).to(tl.int64)
    target = tl.maximum(tl.minimum(target, total - 1), 0)
    start = 0
    scaled = read_block(row, words, masked, start, vocab, temperature, BLOCK)
    weights = tl.where(ordered(scaled) >= key, weigh(scaled, top, BITS), 0)
    here = tl.sum(weights, 0)
    # The total is above the target, so a block is found before the last one ends.
    while (here <= target) & (start + BLOCK < vocab):
        target -= here
        start += BLOCK
        scaled = read_block(row, words, masked, start, vocab, temperature, BLOCK)
        weights = tl.where(ordered(scaled) >= key, weigh(scaled, top, BITS), 0)
        here = tl.sum(weights, 0)
    passed = (tl.cumsum(weights, 0) <= target).to(tl.int32)
    return (start + tl.sum(passed, 0)).to(tl.int64)


# Numbers and addresses of other steps are worth no other kernel: none is compiled while a server serves.
# fmt: off
@triton.jit(
    do_not_specialize=[
        "count", "entries_count", "max_len", "longest", "width", "random", "biased", "penalised", "masked", "scored",
    ],
    do_not_specialize_on_alignment=[
        "bits", "lens", "uniforms", "floats", "whole", "top_ps", "entries", "values", "saved", "history", "scratch",
        "words", "normalisers", "tokens", "non_finite", "logprobs",
    ],
)
def _sample_row(
    logits, bits, lens, uniforms, floats, whole, top_ps, entries, values, saved, history, scratch, words, normalisers,
    tokens, non_finite, logprobs, vocab, count, entries_count, max_len, longest, width,
    random, biased, penalised, masked, scored, BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    # fmt: on
    """Program: place of the S that sample; arguments as in `sample_rows`, those from `random` on 0 or 1."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * vocab
    length = tl.load(lens + place).to(tl.int32)
    first = tl.load(whole + _BIAS_FROM * count + place, mask=biased != 0, other=0).to(tl.int32)
    end = tl.load(whole + _BIAS_END * count + place, mask=biased != 0, other=0).to(tl.int32)
    if end > first:
        add_biases(row, entries, values, saved, first, end, entries_count, length)
    slot = tl.load(whole + _SLOT * count + place, mask=penalised != 0, other=-1)
    told = history + tl.load(whole + _ROW * count + place, mask=penalised != 0, other=0) * max_len
    notes = scratch + tl.maximum(slot, 0) * 3 * longest
    if slot >= 0:
        prompt = tl.load(whole + _PROMPT * count + place)
        repetition = tl.load(floats + _REPETITION * count + place)
        frequency, presence = tl.load(floats + _FREQUENCY * count + place), tl.load(floats + _PRESENCE * count + place)
        penalise(row, bits + place * vocab, told, notes, longest, length, prompt, repetition, frequency, presence)

    group = tl.load(whole + _MASK * count + place, mask=masked != 0, other=-1)
    allowed = words + tl.maximum(group, 0) * width
    peak, token, bottom, is_strange = _peak_of(row, allowed, group >= 0, vocab, BLOCK)
    is_lost = is_strange | (peak == float("inf")) | (peak == float("-inf"))
    temperature = tl.load(floats + place, mask=random != 0, other=0.0)
    top = tl.div_rn(peak, tl.where(temperature > 0, temperature, 1.0))
    # A quotient may be too large for a float32 where the logit is not: nothing comes near it then.
    if (temperature > 0) & (is_lost == 0) & (tl.abs(top) < float("inf")):
        top_k, top_p = tl.load(whole + _TOP_K * count + place), tl.load(top_ps + place)
        floor, uniform = tl.load(floats + _FLOOR * count + place), tl.load(uniforms + place)
        bottom = tl.div_rn(bottom, temperature)
        # fmt: off
        cut = _cutoff(
            row, allowed, group >= 0, vocab, temperature, top, bottom, top_k, top_p, floor, BITS, BLOCK,
        )
        # fmt: on
        token = _drawn(row, allowed, group >= 0, vocab, temperature, top, cut.to(tl.int32), uniform, BITS, BLOCK)
    token = tl.where(is_lost, 0, token)
    tl.store(tokens + place, token)
    tl.store(non_finite + place, is_lost.to(tl.int8))
    if scored != 0:
        value = tl.load(row + token)
        if slot >= 0:
            held = notes.to(tl.pointer_type(tl.float32), bitcast=True)
            value = saved_logit(token, value, held, told, 0, length)
        # Biases were added before the penalties looked.
        value = saved_logit(token, value, saved, entries, first, end)
        peak, total = tl.load(normalisers + 2 * place), tl.load(normalisers + 2 * place + 1)
        tl.store(logprobs + place, value - peak - total)


@torch.library.custom_op(
    "slipstream::sample_rows", mutates_args=("logits", "saved", "scratch", "tokens", "non_finite", "logprobs")
)
def sample_rows(
    logits: torch.Tensor,
    lens: torch.Tensor,
    uniforms: torch.Tensor,
    floats: torch.Tensor | None,
    whole: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    entries: torch.Tensor | None,
    values: torch.Tensor | None,
    saved: torch.Tensor | None,
    history: torch.Tensor | None,
    scratch: torch.Tensor | None,
    words: torch.Tensor | None,
    normalisers: torch.Tensor | None,
    tokens: torch.Tensor,
    non_finite: torch.Tensor,
    logprobs: torch.Tensor | None,
    random: bool,
) -> None:
    """tokens, int64[S], non_finite, bool[S], and logprobs, float32[S] or None, of logits, contiguous float32[S, V].

    lens: int64[S]; uniforms: float64[S], of no use unless `random`; floats, whole, top_ps: see `Options`, None for a
    greedy batch without any. What is None, no row has: biases (entries, values, and as many float32 to be `saved`),
    penalties (history, int32[R, max_len], and scratch, int32[P, 3, longest] for P rows), masks (words), and log
    probabilities (normalisers, float32[S, 2] of `normalise`). The logits are changed, and of no use afterwards. An
    operator, not a plain launch, so that whatever watches the dispatcher sees what it reads and writes.
    """
    (rows, vocab), device = logits.shape, logits.device
    assert lens.is_contiguous() and (not random or uniforms.is_contiguous()), (lens.stride(), uniforms.stride())
    kinds = (torch.float32, torch.int32, torch.int64)
    floats32, int32, int64 = (torch.empty(0, dtype=kind, device=device) for kind in kinds)
    # fmt: off
    _sample_row[(rows,)](
        logits, logits.view(torch.int32), lens, uniforms, _or(floats, floats32), _or(whole, int64),
        uniforms if top_ps is None else top_ps, _or(entries, int64), _or(values, floats32), _or(saved, floats32),
        _or(history, int32), _or(scratch, int32), _or(words, int32), _or(normalisers, floats32), tokens,
        non_finite.view(torch.int8), _or(logprobs, floats32), vocab, rows, 0 if values is None else len(values),
        0 if history is None else history.shape[1], 0 if scratch is None else scratch.shape[2],
        0 if words is None else words.shape[1], int(random), int(values is not None), int(scratch is not None),
        int(words is not None), int(logprobs is not None),
        BITS=weight_bits(vocab + -vocab % PADDING), BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )
    # fmt: on


def _or(given: torch.Tensor | None, nothing: torch.Tensor) -> torch.Tensor:
    """What is passed for an argument: of one dtype always, since another would be another kernel."""
    return nothing if given is None else given


@sample_rows.register_fake
def _(*_arguments: object) -> None:
    """Nothing to tell of shapes: everything that it makes was there before."""
