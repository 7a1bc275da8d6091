"""The contract of an attention backend: write this step's keys and values into the pool, attend through the page table.

The runner and the models see nothing of attention but this class. Every registered backend must pass
`tests/unit/core/attention/test_conformance.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from core.attention.relative_bias import RelativeBias
from core.batch.forward_batch import ForwardBatch
from core.memory.kv_format import KVFormat

MOST_CHUNKS = 32
"""Prompt chunks, padding included, of a step of whose chunks only the device knows the lengths."""


class AttentionBackend(ABC):
    """Belongs to one model runner and lives on its forward thread and stream; never shared between engines.

    A step is one `plan(batch)` followed by one `forward` per attention layer. T, H and so on are the batch's: T tokens
    in one packed row, prefill segments first (`batch.num_extend` of them), then one token for each other row.
    """

    graph_safe: ClassVar[bool] = False
    """True promises that for a DECODE batch `plan` and `forward` read only device tensors and shapes, never the host
    lengths, and never wait for the device. Then both may be captured once and replayed with other contents in the same
    tensors, padded by row 0 with length 1. False lets the backend loop over `prefix_lens_host` and `extend_lens_host`,
    which keeps it out of captured graphs."""

    grid_safe: ClassVar[bool] = False
    """True promises that `plan` and `forward` read no host lengths but those of prompt chunks, in any step, and compute
    grids (`ForwardBatch.grid_width`), where all lengths are on the device, captured or not. Of a place that does not
    count the output is finite."""

    mixed_safe: ClassVar[bool] = False
    """True promises that `plan` and `forward` compute steps that bring `ForwardBatch.starts`: up to MOST_CHUNKS prompt
    chunks one behind the other, of which the host knows how many places they have together and no more. They read
    device tensors and shapes alone then, and never wait, so both may be captured and replayed, decode rows included
    (`graph_safe`). Of a place behind the last chunk the output is finite."""

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        """Why this backend cannot run on `device`, in one line; None if it can."""
        return None

    @classmethod
    def why_not_stored(cls, format: KVFormat, dtype: torch.dtype) -> str | None:
        """Why this backend cannot attend over keys of `dtype` that a pool stores as `format`, as the end of a sentence.

        None if it can. By default a backend reads what is stored as it was computed, and nothing else.
        """
        return None if format.codes is None else "it reads keys and values as they were computed"

    def sibling(self) -> AttentionBackend:
        """A new backend of this class, for layers of a model whose KV is in another pool: a plan is for one pool."""
        return type(self)()

    def rehearsals(self, rows: int, device: torch.device) -> Sequence[Sequence[int]]:
        """Steps of up to `rows` prompts that between them launch everything that is compiled when it is launched first.

        Each is the tokens of its prompts, the empty one a decode step. A backend that compiles nothing names no step.
        """
        return ()

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepare what all layers of this step share: gather indices, masks, split sizes.

        Called after the step's writes to `batch.req_to_token`. May read every field of `batch` (but see `graph_safe`).
        The backend may keep `batch` until the next call. Forgets the previous step.
        """

    @abstractmethod
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
        """Attention of one layer; returns [T, H, Dv] in q's dtype, contiguous.

        First stores `k` [Hkv, T, D] and `v` [Hkv, T, Dv] in `batch.kv_pool` at `batch.out_cache_loc`, unless they are
        `stored`: then the caller has written just these there, and has told the pool's recorder. Then row i attends
        causally over the tokens in `req_to_token[rows[i], :prefix + extend]`, its own of this step included. These are
        slots of the ordinary pool: translate them by `batch.pool_slots` (or `page_map`) before reading. Where the pool
        stores codes (`KVFormat`), its own tokens too are read as the pool holds them. `q` is
        [H, T, D]; H is a multiple of Hkv and query head h reads KV head h // (H / Hkv). Inputs may be strided.

        scores = q·k · scale, then softcap · tanh(scores / softcap) if given; then what `AttentionSpan(sliding_window,
        chunk_size)` hides is removed; then a softmax whose denominator also counts exp(sinks[h]) if `sinks` [H] is
        given. `bias` (T5) is added to the scaled scores; it comes with as many KV heads as query heads, and without
        softcap, sinks, window or chunk.

        A layer may be called twice in a step with the same k and v (layers that share KV): the write is idempotent.
        A row's output must not depend on the other rows beyond float rounding. The output of a padded row (row 0,
        length 1, slot 0) must be finite and change no other row. A slot beyond a row's length may hold anything, even
        NaN.
        """
