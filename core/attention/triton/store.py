"""Keys and values of a step into their slots, in one launch instead of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# fmt: off
@triton.jit
def _store(
    keys, values, k, v, slots, k_slot, k_head, v_slot, v_head, from_k_head, from_k_token, from_v_head, from_v_token,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr, BOTH: tl.constexpr,
) -> None:
    # fmt: on
    """Program (token, KV head)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    dims = tl.arange(0, BLOCK)
    key = tl.load(k + head * from_k_head + token * from_k_token + dims, mask=dims < K_DIM)
    tl.store(keys + slot * k_slot + head * k_head + dims, key, mask=dims < K_DIM)
    if BOTH:
        value = tl.load(v + head * from_v_head + token * from_v_token + dims, mask=dims < V_DIM)
        tl.store(values + slot * v_slot + head * v_head + dims, value, mask=dims < V_DIM)


@torch.library.custom_op("slipstream::store_kv", mutates_args=("keys", "values"))
def store_kv(
    keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, both: bool
) -> None:
    """keys[slots[i], h] = k[h, i], and so for values if `both`.

    keys, values: [slots, Hkv, D or Dv]; k, v: [Hkv, T, D or Dv], last dimension dense; slots: int64[T].
    """
    heads, tokens, k_dim = k.shape
    v_dim = v.shape[2]
    # fmt: off
    _store[(tokens, heads)](
        keys, values, k, v, slots, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), k.stride(0),
        k.stride(1), v.stride(0), v.stride(1),
        K_DIM=k_dim, V_DIM=v_dim, BLOCK=triton.next_power_of_2(max(k_dim, v_dim)), BOTH=both,
    )
    # fmt: on
