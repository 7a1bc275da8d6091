"""Rotary position embedding of queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# fmt: off
@triton.jit
def _rotate(
    q, k, cos, sin, q_out, k_out, q_head, q_token, k_head, k_token, to_q_head, to_q_token, to_k_head, to_k_token,
    table_token, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    # fmt: on
    """Program (token, head): query heads first, key heads behind them."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < HEADS:
        source, target = q + head * q_head + token * q_token, q_out + head * to_q_head + token * to_q_token
    else:
        place = head - HEADS
        source, target = k + place * k_head + token * k_token, k_out + place * to_k_head + token * to_k_token
    dims = tl.arange(0, BLOCK)
    inside = dims < HALF
    low = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + dims, mask=inside, other=0.0).to(tl.float32)
    angles = token * table_token + dims
    cos_low = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + HALF + angles, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + HALF + angles, mask=inside, other=0.0).to(tl.float32)
    kind = q_out.dtype.element_ty
    tl.store(target + dims, (low * cos_low - high * sin_low).to(kind), mask=inside)
    tl.store(target + HALF + dims, (high * cos_high + low * sin_high).to(kind), mask=inside)


@torch.library.custom_op("slipstream::rotate", mutates_args=())
def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [1, H, T, D] and k [1, Hkv, T, D], last dimension dense, turned by cos and sin [1, T, D]; their dtype."""
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _, heads, tokens, width = q.shape
    table = cos.contiguous(), sin.contiguous()
    # fmt: off
    _rotate[(tokens, heads + k.shape[1])](
        q, k, *table, q_out, k_out, q.stride(1), q.stride(2), k.stride(1), k.stride(2),
        q_out.stride(1), q_out.stride(2), k_out.stride(1), k_out.stride(2), width,
        HEADS=heads, HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2),
    )
    # fmt: on
    return q_out, k_out
