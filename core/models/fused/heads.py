"""From the product of queries, keys and values to what attention reads, in one launch.

Queries and keys are normed and turned in place, in the order of the family, queries are multiplied by the temperature
of their position, and keys and values are written to their slots in the paged pool. Rotation and cache write in one
kernel are as in vLLM's `fused_rope_kvcache` and FlashInfer's `rope_append_paged_kv_cache`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from core.attention.triton.e4m3 import encode_by, exponents_of


class HeadLayout(NamedTuple):
    """Where heads lie in a row of the product, and what is done to them. Elements."""

    heads: int
    kv_heads: int
    dim: int
    step: int
    """From one head to the next of its kind."""
    keys: int
    """Where the first key begins; queries begin at 0."""
    values: int
    half: int
    """Pairs that are turned in a head."""
    neighbours: int
    """Whether a pair is two neighbours, and not two elements `half` apart."""
    whole: int
    """Whether a norm is over all heads of a token and not over each of them."""
    turns_first: int
    """Whether heads are turned before they are normed."""
    q_kind: int
    """Bits as in `core.models.fused.residual`; 0 for no norm."""
    k_kind: int
    q_step: int
    """From the norm's weights of one head to those of the next: 0 where all heads share them."""
    k_step: int

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [H, T, D], keys and values [Hkv, T, D] of qkv [T, N]: views."""
        begins = ((0, self.heads), (self.keys, self.kv_heads), (self.values, self.kv_heads))
        tokens, width = qkv.stride()
        assert width == 1, "elements of a row lie side by side"
        q, k, v = (
            qkv.as_strided((count, len(qkv), self.dim), (self.step, tokens, 1), qkv.storage_offset() + begin)
            for begin, count in begins
        )
        return q, k, v


@triton.jit
def _turn(low, high, cos, sin, position, pairs, turned, HALF: tl.constexpr, KIND) -> tuple[tl.tensor, tl.tensor]:
    """Pairs (low, high), float32 [H, P], by the angles of `position`; products rounded to the type of the tables."""
    at = position * HALF + pairs
    c, s = tl.load(cos + at, mask=turned, other=0.0), tl.load(sin + at, mask=turned, other=0.0)
    step: tl.constexpr = c.dtype
    c, s = c.to(tl.float32)[None, :], s.to(tl.float32)[None, :]
    first = (low * c).to(step).to(tl.float32) - (high * s).to(step).to(tl.float32)
    second = (high * c).to(step).to(tl.float32) + (low * s).to(step).to(tl.float32)
    return first.to(KIND).to(tl.float32), second.to(KIND).to(tl.float32)


@triton.jit
def _total(low, high, rest, WHOLE: tl.constexpr) -> tl.tensor:
    """float32 [H, 1]: the sum over a head, or over all of them."""
    total = tl.sum(low, 1) + tl.sum(high, 1) + tl.sum(rest, 1)
    if WHOLE:
        total = tl.zeros_like(total) + tl.sum(total, 0)
    return total[:, None]


@triton.jit
def _weighed(scaled, at, there, weight, bias, NORM: tl.constexpr, KIND) -> tl.tensor:
    weights = tl.load(weight + at, mask=there, other=0.0)
    normed = scaled.to(weights.dtype).to(tl.float32) * weights.to(tl.float32)
    if NORM & 4:
        normed += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    return normed.to(KIND).to(tl.float32)


# fmt: off
@triton.jit
def _prepare(
    base, heads, there, position, cos, sin, weight, bias, eps, width, KIND,
    DIM: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, NORM: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr, TURNS_FIRST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    # fmt: on
    """Heads [H] that begin at `base` [H], normed and turned: both halves of their pairs, and what is not turned."""
    pairs, rest = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
    lows = pairs * 2 if NEIGHBOURS else pairs
    highs = pairs * 2 + 1 if NEIGHBOURS else pairs + HALF
    turned = pairs < HALF
    paired, alone = there[:, None] & turned[None, :], there[:, None] & (rest < DIM)[None, :]
    low = tl.load(base[:, None] + lows[None, :], mask=paired, other=0.0).to(tl.float32)
    high = tl.load(base[:, None] + highs[None, :], mask=paired, other=0.0).to(tl.float32)
    others = tl.load(base[:, None] + rest[None, :], mask=alone, other=0.0).to(tl.float32)
    if TURNS_FIRST:
        low, high = _turn(low, high, cos, sin, position, pairs, turned, HALF, KIND)
    if NORM:
        if NORM & 2:
            mean = _total(low, high, others, WHOLE) / width
            low, high = tl.where(paired, low - mean, 0.0), tl.where(paired, high - mean, 0.0)
            others = tl.where(alone, others - mean, 0.0)
        scale = tl.rsqrt(_total(low * low, high * high, others * others, WHOLE) / width + eps)
        at = heads[:, None] * STEP
        low = _weighed(low * scale, at + lows[None, :], paired, weight, bias, NORM, KIND)
        high = _weighed(high * scale, at + highs[None, :], paired, weight, bias, NORM, KIND)
        others = _weighed(others * scale, at + rest[None, :], alone, weight, bias, NORM, KIND)
    if not TURNS_FIRST:
        low, high = _turn(low, high, cos, sin, position, pairs, turned, HALF, KIND)
    return low, high, others


@triton.jit
def _put(base, there, low, high, others, DIM: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr,
         BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr) -> None:
    """Write the three parts of heads that begin at `base` [H]."""
    pairs, rest = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
    lows = pairs * 2 if NEIGHBOURS else pairs
    highs = pairs * 2 + 1 if NEIGHBOURS else pairs + HALF
    paired, alone = there[:, None] & (pairs < HALF)[None, :], there[:, None] & (rest < DIM)[None, :]
    tl.store(base[:, None] + lows[None, :], low, mask=paired)
    tl.store(base[:, None] + highs[None, :], high, mask=paired)
    tl.store(base[:, None] + rest[None, :], others, mask=alone)


@triton.jit
def _part(part, there, KIND) -> tl.tensor:
    """`part` as it is stored without codes, and zeros where it is not `there`: float32."""
    return tl.where(there, part.to(KIND).to(tl.float32), 0.0)


# fmt: off
@triton.jit
def _put_coded(base, scales, there, low, high, others, KIND, DIM: tl.constexpr, HALF: tl.constexpr,
               NEIGHBOURS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr) -> None:
    # fmt: on
    """Write the codes of the three parts of heads to `base` [H], and the exponents of their scales to `scales` [H]."""
    paired = there[:, None] & (tl.arange(0, BLOCK_HALF) < HALF)[None, :]
    alone = there[:, None] & (2 * HALF + tl.arange(0, BLOCK_REST) < DIM)[None, :]
    low, high, others = _part(low, paired, KIND), _part(high, paired, KIND), _part(others, alone, KIND)
    exponents = tl.maximum(tl.maximum(exponents_of(low), exponents_of(high)), exponents_of(others))
    tl.store(scales, exponents.to(tl.uint8), mask=there)
    low, high, others = encode_by(low, exponents), encode_by(high, exponents), encode_by(others, exponents)
    _put(base, there, low, high, others, DIM, HALF, NEIGHBOURS, BLOCK_HALF, BLOCK_REST)


# Where positions and slots begin in what was uploaded is not worth another compilation.
# fmt: off
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _enter_heads(
    qkv, positions, slots, cos, sin, temperature, q_weight, q_bias, k_weight, k_bias, keys, values, k_scales,
    v_scales, q_eps, k_eps, length, token_step, k_slot, k_head, v_slot, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_STEP: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr, WHOLE: tl.constexpr,
    TURNS_FIRST: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    TEMPERED: tl.constexpr, CODES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:
    # fmt: on
    """Program (token, block of heads): those of queries first, those of keys and values behind them."""
    token, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # What drafts try beyond the last position is computed and not read: it must not read beyond the tables either.
    position = tl.minimum(tl.maximum(tl.load(positions + token), 0), length - 1)
    row = qkv + token * token_step
    units: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    kind = qkv.dtype.element_ty
    if unit < units:
        heads = unit * BLOCK_H + tl.arange(0, BLOCK_H)
        there, base = heads < HEADS, row + heads * HEAD_STEP
        low, high, others = _prepare(
            base, heads, there, position, cos, sin, q_weight, q_bias, q_eps, HEADS * DIM if WHOLE else DIM, kind,
            DIM, HALF, NEIGHBOURS, BLOCK_HALF, BLOCK_REST, Q_NORM, Q_STEP, WHOLE, TURNS_FIRST,
        )  # fmt: skip
        if TEMPERED:
            warmth = tl.load(temperature + position)
            low, high, others = low * warmth, high * warmth, others * warmth
        # Threads without a part of their own read what others hold: all have read before any of them writes.
        tl.debug_barrier()
        _put(base, there, low.to(kind), high.to(kind), others.to(kind), DIM, HALF, NEIGHBOURS, BLOCK_HALF, BLOCK_REST)
    else:
        heads = (unit - units) * BLOCK_H + tl.arange(0, BLOCK_H)
        there, slot = heads < KV_HEADS, tl.load(slots + token)
        base, to = row + KEYS + heads * HEAD_STEP, keys + slot * k_slot + heads * k_head
        low, high, others = _prepare(
            base, heads, there, position, cos, sin, k_weight, k_bias, k_eps, KV_HEADS * DIM if WHOLE else DIM, kind,
            DIM, HALF, NEIGHBOURS, BLOCK_HALF, BLOCK_REST, K_NORM, K_STEP, WHOLE, TURNS_FIRST,
        )  # fmt: skip
        tl.debug_barrier()
        _put(base, there, low.to(kind), high.to(kind), others.to(kind), DIM, HALF, NEIGHBOURS, BLOCK_HALF, BLOCK_REST)
        columns = tl.arange(0, BLOCK_V)
        whole = there[:, None] & (columns < DIM)[None, :]
        value = tl.load((row + VALUES + heads * HEAD_STEP)[:, None] + columns[None, :], mask=whole, other=0.0)
        if CODES:
            place = slot * KV_HEADS + heads
            _put_coded(to, k_scales + place, there, low, high, others, kind, DIM, HALF, NEIGHBOURS, BLOCK_HALF,
                       BLOCK_REST)  # fmt: skip
            value = value.to(tl.float32)
            exponents = exponents_of(value)
            tl.store(v_scales + place, exponents.to(tl.uint8), mask=there)
            value = encode_by(value, exponents)
        else:
            _put(to, there, low.to(kind), high.to(kind), others.to(kind), DIM, HALF, NEIGHBOURS, BLOCK_HALF, BLOCK_REST)
        tl.store((values + slot * v_slot + heads * v_head)[:, None] + columns[None, :], value, mask=whole)


@torch.library.custom_op("slipstream::enter_heads", mutates_args=("qkv", "keys", "values", "k_scales", "v_scales"))
def enter_heads(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    temperature: torch.Tensor | None,
    norms: list[torch.Tensor],
    eps: list[float],
    layout: list[int],
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """Norm and turn the queries and keys of qkv [T, N] in place, and store its keys and values at `slots`; T > 0.

    keys, values: the pool's [slots, Hkv, D]; positions, slots: int64[T]; cos, sin: [length, R / 2] or None;
    temperature: float32[length] or None; norms, eps: of queries and of keys, as `norms_of` has them; layout: a
    `HeadLayout`. Positions beyond the tables read their last line. With k_scales and v_scales, uint8[slots, Hkv],
    codes of `core.memory.kv_e4m3` are stored, as `core.attention.triton.store` does; qkv keeps numbers.
    """
    it = HeadLayout(*layout)
    block_h = triton.next_power_of_2(it.heads) if it.whole else 1
    tables = [each for each in (cos, temperature) if each is not None]
    sizes = {
        "BLOCK_HALF": triton.next_power_of_2(max(1, it.half)),
        "BLOCK_REST": triton.next_power_of_2(max(1, it.dim - 2 * it.half)),
        "BLOCK_V": triton.next_power_of_2(it.dim),
    }
    scaled = (keys, values) if k_scales is None else (k_scales, v_scales)
    units = triton.cdiv(it.heads, block_h) + triton.cdiv(it.kv_heads, block_h)
    # fmt: off
    _enter_heads[(len(qkv), units)](
        qkv, positions, slots, qkv if cos is None else cos, qkv if sin is None else sin,
        qkv if temperature is None else temperature, *norms, keys, values, *scaled, *eps,
        len(tables[0]) if tables else 1 << 30, qkv.stride(0), *keys.stride()[:2], *values.stride()[:2],
        HEADS=it.heads, KV_HEADS=it.kv_heads, DIM=it.dim, HEAD_STEP=it.step, KEYS=it.keys, VALUES=it.values,
        HALF=it.half, NEIGHBOURS=bool(it.neighbours), WHOLE=bool(it.whole), TURNS_FIRST=bool(it.turns_first),
        Q_NORM=it.q_kind, K_NORM=it.k_kind, Q_STEP=it.q_step, K_STEP=it.k_step, TEMPERED=temperature is not None,
        CODES=k_scales is not None, BLOCK_H=block_h, num_warps=warps_of(block_h * it.dim), **sizes,
    )
    # fmt: on


def warps_of(elements: int) -> int:
    """Warps for so many elements of a token: one for a head."""
    return 1 if elements <= 256 else 4 if elements <= 2048 else 8 if elements <= 8192 else 16
