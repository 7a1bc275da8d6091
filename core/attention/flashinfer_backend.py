"""Attention by FlashInfer, where it is installed: `BatchPrefillWithPagedKVCacheWrapper` for prefill and decode alike.

It plans on the host once per step and kind of layer, from lengths that the host has already, and reads pages in place.
"""

from __future__ import annotations

from typing import Any

import flashinfer
import torch

from core.attention.paged_library import PagedCall, PagedLibraryAttention, PagedStep

WORKSPACE_BYTES = 128 << 20
"""Size of the workspace in FlashInfer's own examples."""
WIDTHS = (64, 128, 256)
"""Elements per head for which it has kernels."""


class FlashInferAttention(PagedLibraryAttention):
    """Causal attention with windows and capped scores; no sinks, no chunks."""

    needs = "CUDA and nvcc"

    def __init__(self) -> None:
        super().__init__()
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[PagedCall, Any] = {}
        self._planned: dict[PagedCall, PagedStep] = {}

    def takes(self, call: PagedCall) -> bool:
        """Whether the head width is one of `WIDTHS`."""
        return call.width in WIDTHS

    def attend(
        self, call: PagedCall, step: PagedStep, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Run the wrapper of this kind of layer, planned once per step; [T, H, D]."""
        wrapper = self._wrapper(call, q.device)
        if self._planned.get(call) is not step:
            self._plan(wrapper, call, step, keys.shape[1])
            self._planned[call] = step
        out = wrapper.run(q, (keys, values))
        assert isinstance(out, torch.Tensor)
        return out

    def _wrapper(self, call: PagedCall, device: torch.device) -> Any:
        """A wrapper for each kind of layer, since each holds a plan. All share a workspace: launches come in order."""
        found = self._wrappers.get(call)
        if found is None:
            if self._workspace is None:
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            found = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[call] = found
        return found

    @staticmethod
    def _plan(wrapper: Any, call: PagedCall, step: PagedStep, page_size: int) -> None:
        last = (step.lens - 1) % page_size + 1
        # Host tensors: the library reads lengths on the host, and would wait for the device to fetch them.
        wrapper.plan(
            torch.from_numpy(step.indptr(step.extend_lens)),
            torch.from_numpy(step.indptr(step.counts)),
            step.page_list(),
            torch.from_numpy(last.astype("int32")),
            call.heads,
            call.kv_heads,
            call.width,
            page_size,
            causal=True,
            sm_scale=call.scale,
            window_left=-1 if call.window is None else call.window - 1,
            logits_soft_cap=call.softcap or 0.0,
            q_data_type=call.dtype,
            kv_data_type=call.dtype,
        )
