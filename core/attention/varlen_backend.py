"""Attention by `torch.nn.attention.varlen`, which comes with PyTorch: FlashAttention over packed rows.

FlashAttention 3, once the process has activated it, reads pages through a block table. PyTorch itself brings version 2,
for which it accepts no block table, so keys and values are gathered first.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from core.attention.paged_library import PagedCall, PagedLibraryAttention, PagedStep
from core.device.staging import Staging

WIDEST = 256


class VarlenAttention(PagedLibraryAttention):
    """Causal attention with windows; no capped scores, no sinks, no chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._arguments: _Arguments | None = None

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        """Why not: no CUDA, or a PyTorch whose `varlen_attn` has no block table."""
        if (reason := super().why_not(device)) is not None:
            return reason
        if "block_table" not in inspect.signature(varlen_attn).parameters:
            return f"varlen_attn of PyTorch {torch.__version__} knows no grouped heads and no pages; 2.12 does"
        return None

    def takes(self, call: PagedCall) -> bool:
        """Whether scores are not capped and the head width is a multiple of 8, at most `WIDEST`."""
        return call.softcap is None and call.width <= WIDEST and call.width % 8 == 0

    def attend(
        self, call: PagedCall, step: PagedStep, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Call `varlen_attn` with pages in place where it reads them, else with gathered keys; [T, H, D]."""
        if self._arguments is None or self._arguments.step is not step:
            self._arguments = _Arguments.of(step, keys.shape[1])
        found = self._arguments
        paged = found.slots is None
        if found.slots is not None:
            keys, values = (held.flatten(0, 1).index_select(0, found.slots) for held in (keys, values))
        out = varlen_attn(
            q,
            keys,
            values,
            found.starts_q,
            None if paged else found.starts_k,
            int(step.extend_lens.max()),
            int(step.lens.max()),
            scale=call.scale,
            window_size=(-1 if call.window is None else call.window - 1, 0),
            enable_gqa=call.heads != call.kv_heads,
            seqused_k=found.lens if paged else None,
            block_table=step.pages if paged else None,
        )
        assert isinstance(out, torch.Tensor)
        return out


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments that all layers of one step share, on the device; int32 unless said otherwise."""

    step: PagedStep
    starts_q: torch.Tensor
    starts_k: torch.Tensor
    lens: torch.Tensor
    slots: torch.Tensor | None
    """int64[sum of lengths]: slots of all keys, one row after another; None where pages are read in place."""

    @classmethod
    def of(cls, step: PagedStep, size: int) -> _Arguments:
        device = step.pages.device
        arrays: list[np.ndarray] = [step.indptr(step.extend_lens), step.indptr(step.lens), step.lens.astype(np.int32)]
        starts_q, starts_k, lens = Staging(device).upload(arrays)
        if reads_pages():
            return cls(step, starts_q, starts_k, lens, None)
        slots = (step.pages.to(torch.int64)[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
        index = [row * slots.shape[1] + np.arange(length) for row, length in enumerate(step.lens)]
        places = Staging(device).pinned(index).to(device, non_blocking=True)
        return cls(step, starts_q, starts_k, lens, slots.flatten().index_select(0, places))


def reads_pages() -> bool:
    """Whether the activated FlashAttention takes a block table."""
    # PyTorch names the implementation that was activated; None is its own, version 2, which raises for a block table.
    return torch.nn.attention.current_flash_attention_impl() == "FA3"
