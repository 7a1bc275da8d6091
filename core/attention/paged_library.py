"""The common part of backends around a library's kernels: which calls it gets, page lists, and writing the keys."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from core.attention.base import AttentionBackend
from core.attention.relative_bias import RelativeBias
from core.attention.torch_native import TorchNativeAttention
from core.batch.forward_batch import ForwardBatch
from core.batch.ragged import walk_runs
from core.device.staging import Staging
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class PagedCall:
    """The parameters of one layer's attention that do not change within a step."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    window: int | None
    softcap: float | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The rows of one step. Host arrays are int64, device tensors int32."""

    extend_lens: Ints
    lens: Ints
    pages: torch.Tensor
    """[B, most pages of a row]: pages of each row in order; entries beyond `counts` mean nothing."""
    counts: Ints
    """[B]: how many pages each row has."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> PagedStep:
        """Read the pages of `batch` from its table, once per step, as far as the host lengths go."""
        size = batch.kv_pool.page_size
        lens = batch.prefix_lens_host + batch.extend_lens_host
        counts = -(-lens // size)
        firsts = batch.req_to_token[:, : int(counts.max()) * size : size].index_select(0, batch.rows)
        pages = batch.pool_slots(firsts) // size
        return cls(batch.extend_lens_host, lens, pages.to(torch.int32), counts)

    def indptr(self, lengths: Ints) -> Ints:
        """int32[B + 1]: cumulative sums of `lengths`, int64[B], starting with 0."""
        return np.concatenate([[0], lengths.cumsum()]).astype(np.int32)

    def page_list(self) -> torch.Tensor:
        """int32[sum of counts]: the pages of all rows, row after row."""
        width = self.pages.shape[1]
        row, inside = walk_runs(self.counts)
        (index,) = Staging(self.pages.device).upload([row * width + inside])
        return self.pages.reshape(-1).index_select(0, index)


class PagedLibraryAttention(AttentionBackend):
    """Writes keys and values, then calls `attend` of a subclass. Calls it cannot serve go to the native backend.

    Plans on the host, so decode steps are not captured.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    """Dtypes of keys, values and queries that the library serves."""
    needs: ClassVar[str] = "CUDA"

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._step: PagedStep | None = None
        self._native: TorchNativeAttention | None = None

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        """Why not: the library's kernels run on CUDA only."""
        return None if device.type == "cuda" else f"its kernels need {cls.needs}, not {device.type}"

    @abstractmethod
    def takes(self, call: PagedCall) -> bool:
        """Whether the library has a kernel for `call`: of a dtype among `dtypes`, with keys as wide as values."""

    @abstractmethod
    def attend(
        self, call: PagedCall, step: PagedStep, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[T, H, D] from q [T, H, D], contiguous; keys and values are the pool's, as [pages, page size, Hkv, D]."""

    def plan(self, batch: ForwardBatch) -> None:
        """Read the step's pages from the table; the native backend plans only when a layer needs it."""
        self._batch, self._native = batch, None
        self._step = PagedStep.of(batch)

    def forward(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        chunk_size: int | None = None,
        bias: RelativeBias | None = None,
        stored: bool = False,
    ) -> torch.Tensor:
        """Call the library's kernel where it has one, else the native backend; [T, H, Dv]."""
        batch, step = self._batch, self._step
        assert batch is not None and step is not None, "plan() comes first"
        call = PagedCall(q.shape[0], k.shape[0], q.shape[2], scale, sliding_window, softcap or None, q.dtype)
        plain = sinks is None and chunk_size is None and bias is None and k.shape[2] == v.shape[2]
        if not plain or q.dtype not in self.dtypes or not self.takes(call):
            if self._native is None:
                self._native = TorchNativeAttention()
                self._native.plan(batch)
            return self._native.forward(
                layer_id,
                q,
                k,
                v,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                sinks=sinks,
                chunk_size=chunk_size,
                bias=bias,
                stored=stored,
            )
        pool = batch.kv_pool
        if not stored:
            pool.write(layer_id, batch.out_cache_loc, k.transpose(0, 1), v.transpose(0, 1))
        keys, values = (held.view(-1, pool.page_size, *held.shape[1:]) for held in (pool.k(layer_id), pool.v(layer_id)))
        return self.attend(call, step, q.transpose(0, 1).contiguous(), keys, values).contiguous()
