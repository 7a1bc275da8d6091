"""Keys and values of a step into their slots, in one launch instead of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.attention.triton.e4m3 import encode_by, exponents_of


@triton.jit
def _coded(numbers, scale, there, BLOCK: tl.constexpr) -> tl.tensor:
    """uint8 [BLOCK]: codes of `numbers` where they are `there`; their scale's exponent is stored at `scale`."""
    wide = tl.where(there, numbers.to(tl.float32), 0.0)[None, :]
    exponents = exponents_of(wide)
    tl.store(scale + tl.zeros_like(exponents), exponents.to(tl.uint8))
    return tl.reshape(encode_by(wide, exponents), [BLOCK])


# fmt: off
# Slots lie where the step's transfer has put them: each place of theirs would be another kernel.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store(
    keys, values, k_scales, v_scales, k, v, slots, k_slot, k_head, v_slot, v_head, from_k_head, from_k_token,
    from_v_head, from_v_token,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr, BOTH: tl.constexpr, CODES: tl.constexpr,
) -> None:
    # fmt: on
    """Program (token, KV head)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    dims = tl.arange(0, BLOCK)
    key = tl.load(k + head * from_k_head + token * from_k_token + dims, mask=dims < K_DIM)
    place = slot * tl.num_programs(1) + head
    if CODES:
        key = _coded(key, k_scales + place, dims < K_DIM, BLOCK)
    tl.store(keys + slot * k_slot + head * k_head + dims, key, mask=dims < K_DIM)
    if BOTH:
        value = tl.load(v + head * from_v_head + token * from_v_token + dims, mask=dims < V_DIM)
        if CODES:
            value = _coded(value, v_scales + place, dims < V_DIM, BLOCK)
        tl.store(values + slot * v_slot + head * v_head + dims, value, mask=dims < V_DIM)


@torch.library.custom_op("slipstream::store_kv", mutates_args=("keys", "values", "k_scales", "v_scales"))
def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    both: bool,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """keys[slots[i], h] = k[h, i], and so for values if `both`.

    keys, values: [slots, Hkv, D or Dv]; k, v: [Hkv, T, D or Dv], last dimension dense; slots: int64[T].
    With k_scales and v_scales, uint8[slots, Hkv], codes of `core.memory.kv_e4m3` are stored.
    """
    heads, tokens, k_dim = k.shape
    v_dim = v.shape[2]
    scaled = (keys, values) if k_scales is None else (k_scales, v_scales)
    # fmt: off
    _store[(tokens, heads)](
        keys, values, *scaled, k, v, slots, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        K_DIM=k_dim, V_DIM=v_dim, BLOCK=triton.next_power_of_2(max(k_dim, v_dim)), BOTH=both,
        CODES=k_scales is not None,
    )
    # fmt: on
