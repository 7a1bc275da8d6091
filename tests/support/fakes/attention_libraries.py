"""Stand-ins for attention libraries that need a GPU: their documented arguments, checked, over plain PyTorch.

Signatures are those of `torch.nn.attention.varlen` (PyTorch 2.13) and of FlashInfer's paged prefill wrapper (0.7). That
a call fits them is all that they prove; the libraries themselves have not been run.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch


def attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, softcap: float = 0.0
) -> torch.Tensor:
    """[t, H, D]: the last t of L positions attend causally to L keys [L, Hkv, D], `left` of them before their own."""
    group = q.shape[1] // k.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1).double() for each in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(k.shape[0])
    own = places[-q.shape[0] :, None]
    seen = (places <= own) & ((left < 0) | (places >= own - left))
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, values).to(q.dtype)


class Varlen:
    """`varlen_attn` by the formula. `paged`: how many calls brought a block table."""

    def __init__(self) -> None:
        self.calls = self.paged = 0

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        self.calls += 1
        assert query.is_contiguous() and cu_seq_q.dtype == torch.int32
        assert window_size[1] == 0 and scale is not None
        assert enable_gqa == (query.shape[1] != key.shape[-2])
        if block_table is not None:
            self.paged += 1
            assert seqused_k is not None and cu_seq_k is None
            assert block_table.dtype == seqused_k.dtype == torch.int32 and key.dim() == 4
            lens = seqused_k.tolist()
            pieces = [
                [held[pages.long()].flatten(0, 1)[:length] for held in (key, value)]
                for pages, length in zip(block_table, lens, strict=True)
            ]
        else:
            assert cu_seq_k is not None and cu_seq_k.dtype == torch.int32 and key.dim() == 3
            lens = cu_seq_k.diff().tolist()
            assert sum(lens) == key.shape[0] == value.shape[0]
            pieces = [list(pair) for pair in zip(key.split(lens), value.split(lens), strict=True)]
        counts = cu_seq_q.diff().tolist()
        assert (max(counts), max(lens)) == (max_q, max_k) and sum(counts) == query.shape[0]
        parts = zip(query.split(counts), pieces, strict=True)
        return torch.cat([attend_row(q, k, v, scale, window_size[0]) for q, (k, v) in parts])


class BatchPrefillWithPagedKVCacheWrapper:
    """Plans and runs by the formula."""

    plans = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        self._plan: dict[str, Any] | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
    ) -> None:
        type(self).plans += 1
        assert causal and sm_scale is not None and q_data_type == kv_data_type
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32 and each.dim() == 1
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        self._plan = {**locals()}

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        plan = self._plan
        assert plan is not None, "plan() comes before run()"
        assert q.shape[1:] == (plan["num_qo_heads"], plan["head_dim_qk"]) and q.dtype == plan["q_data_type"]
        shape = (plan["page_size"], plan["num_kv_heads"], plan["head_dim_qk"])
        assert all(cache.shape[1:] == shape for cache in paged_kv_cache)
        lens = ((plan["paged_kv_indptr"].diff() - 1) * plan["page_size"] + plan["paged_kv_last_page_len"]).tolist()
        pages = plan["paged_kv_indices"].long().split(plan["paged_kv_indptr"].diff().tolist())
        out = []
        for tokens, row, length in zip(q.split(plan["qo_indptr"].diff().tolist()), pages, lens, strict=True):
            k, v = (cache[row].flatten(0, 1)[:length] for cache in paged_kv_cache)
            out.append(attend_row(tokens, k, v, plan["sm_scale"], plan["window_left"], plan["logits_soft_cap"]))
        return torch.cat(out)


def fake_flashinfer() -> ModuleType:
    """To be put where `import flashinfer` looks."""
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    return module
