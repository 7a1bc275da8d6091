"""Attention by our own Triton kernels: the backend of CUDA devices, and safe to capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from core.attention.base import AttentionBackend
from core.attention.relative_bias import RelativeBias
from core.attention.torch_native import TorchNativeAttention
from core.attention.triton.codes import codes_of
from core.attention.triton.decode import paged_decode
from core.attention.triton.extend import paged_extend
from core.attention.triton.store import store_kv
from core.attention.triton.tiles import Tiles, rehearsed
from core.batch.forward_batch import ForwardBatch
from core.batch.ragged import starts_of
from core.device.staging import Staging
from core.memory.kv_e4m3 import FP8_E4M3
from core.memory.kv_format import PLAIN, KVFormat
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class _Segments:
    """Prefill segments of one step, on the device: int64[n] each."""

    starts: torch.Tensor
    prefixes: torch.Tensor
    longest: int
    tokens: int
    shared: bool = False
    """Whether the `longest` places are for all segments together, as `paged_extend` says."""


Paged = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Keys and values of a pool, its table, and its map of pages."""
FORMATS = (PLAIN.name, FP8_E4M3.name)
"""Of keys and values, by name."""


class TritonAttention(AttentionBackend):
    """One launch for all prefill segments of a step and one for all single tokens. Of a step with prompts a bias
    (T5) goes to the native backend."""

    graph_safe = True
    grid_safe = True
    mixed_safe = True

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._segments: _Segments | None = None
        self._native: TorchNativeAttention | None = None
        self._tiles: dict[tuple[int, torch.dtype, int], Tiles] = {}
        self._arrived: list[torch.Tensor] = []

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        """Why not: neither CUDA nor Triton's interpreter."""
        if device.type == "cuda" or triton.knobs.runtime.interpret:
            return None
        return f"Triton compiles for GPUs, not for {device.type}; TRITON_INTERPRET=1 interprets it, for tests"

    @classmethod
    def why_not_stored(cls, format: KVFormat, dtype: torch.dtype) -> str | None:
        """See `AttentionBackend`. Weights times scales would leave the range of float16, and float32 the registers."""
        if format.name not in FORMATS:
            return f"its kernels read {' and '.join(FORMATS)} alone"
        if format.codes is not None and dtype is not torch.bfloat16:
            return f"its kernels make bfloat16 of {format.name}, and the model computes in {dtype}"
        return None

    def rehearsals(self, rows: int, device: torch.device) -> list[list[int]]:
        """See `AttentionBackend`. Where kernels are interpreted there is nothing to compile."""
        if device.type != "cuda":
            return []
        return rehearsed(rows, torch.cuda.get_device_properties(device).multi_processor_count)

    def plan(self, batch: ForwardBatch) -> None:
        """Upload the places of prefill segments, if the step has not. A decode step needs no plan."""
        self._batch, self._segments, self._native = batch, None, None
        if batch.starts is not None:
            self._segments = _together(batch, batch.starts)
        elif batch.prefix_lens is not None:
            self._segments = _grid(batch, batch.prefix_lens)
        elif batch.num_extend:
            extend = batch.extend_lens_host[: batch.num_extend]
            starts, prefixes = batch.segments or _uploaded(batch, extend)
            self._segments = _Segments(starts, prefixes, int(extend.max()), int(extend.sum()))

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
        """Store keys and values, then launch the prefill kernel and the decode kernel as needed; [T, H, Dv]."""
        batch = self._batch
        assert batch is not None, "plan() comes first"
        if bias is not None and batch.num_extend:
            return self._biased(batch, layer_id, q, k, v, scale, bias, stored)
        q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
        if not stored:
            self._store(batch, layer_id, k, v)
        pool = batch.kv_pool
        keys, values = pool.k(layer_id), pool.v(layer_id)
        scales = pool.k_scales(layer_id), pool.v_scales(layer_id)
        # The kernel leaves out places that do not count. What stands there goes on to the next layer, and to slot 0.
        some_count = batch.grid_width or batch.starts is not None
        out = (q.new_zeros if some_count else q.new_empty)(q.shape[1], q.shape[0], v.shape[2])
        spans = (scale, softcap or 0.0, sliding_window or 0, chunk_size or 0, pool.page_size)
        paged = (keys, values, batch.req_to_token, batch.page_map)
        self._launch(out, q, paged, scales, sinks, spans, bias)
        return out

    def _launch(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        paged: Paged,
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
        sinks: torch.Tensor | None,
        spans: tuple[float, float, int, int, int],
        bias: RelativeBias | None,
    ) -> None:
        """Fill `out` [T, H, Dv] from q [H, T, D]; the others are arguments of `paged_decode`, by their places."""
        batch = self._batch
        assert batch is not None, "plan() comes first"
        keys, v_dim = paged[0], out.shape[2]
        tiles, count, tokens = self._tiles_for(q, codes_of(keys)), batch.num_extend, 0
        if self._segments is not None:
            parts, tokens = self._segments, self._segments.tokens
            where = (batch.rows[:count], batch.seq_lens[:count], parts.starts, parts.prefixes, parts.longest)
            # Of segments that share places there is one at least, and mostly no more.
            sure = 1 if parts.shared else count
            tile = tiles.extend(parts.longest, sure, q.shape[0], keys.shape[1], batch.req_to_token.shape[1])
            paged_extend(out[:tokens], q[:, :tokens], *paged, *where, sinks, *spans, *tile, parts.shared, *scales)
        if tokens < q.shape[1]:
            rows, lens = batch.rows[count:], batch.seq_lens[count:]
            shape = (len(rows), q.shape[0], keys.shape[1], v_dim, batch.req_to_token.shape[1])
            cut, table = tiles.decode(*shape), None if bias is None else bias.table
            arrived = self._counters(batch, q.shape[0]) if cut.joins(v_dim) else None
            paged_decode(out[tokens:], q[:, tokens:], *paged, rows, lens, sinks, *spans, *cut, arrived, table, *scales)

    @staticmethod
    def _store(batch: ForwardBatch, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
        pool = batch.kv_pool
        if pool.recorder is not None:
            pool.recorder.wrote(pool.name, batch.out_cache_loc)
        assert k.dtype == v.dtype == pool.dtype, (k.dtype, v.dtype, pool.dtype)
        both, scales = not pool.v_in_k(layer_id), (pool.k_scales(layer_id), pool.v_scales(layer_id))
        store_kv(pool.k(layer_id), pool.v(layer_id), k, v, batch.out_cache_loc, both, *scales)

    def _counters(self, batch: ForwardBatch, heads: int) -> torch.Tensor:
        """int32 zeros for every row that there can be: where they are captured they stay for good."""
        count = max(len(batch.rows), len(batch.req_to_token)) * heads
        if not self._arrived or self._arrived[-1].numel() < count:
            # Made inside inference mode it could not be written outside later.
            with torch.inference_mode(False):
                self._arrived.append(torch.zeros(count, dtype=torch.int32, device=batch.rows.device))
        return self._arrived[-1]

    def _tiles_for(self, q: torch.Tensor, codes: int) -> Tiles:
        keys = q.shape[2], q.dtype, codes
        found = self._tiles.get(keys)
        if found is None:
            found = self._tiles[keys] = Tiles.of(q.device, *keys)
        return found

    def _biased(
        self,
        batch: ForwardBatch,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        bias: RelativeBias,
        stored: bool,
    ) -> torch.Tensor:
        """The native backend's attention, for steps with prompt chunks: their kernel knows no bias."""
        if self._native is None:
            self._native = TorchNativeAttention()
            self._native.plan(batch)
        return self._native.forward(layer_id, q, k, v, scale=scale, bias=bias, stored=stored)


def _uploaded(batch: ForwardBatch, extend: Ints) -> list[torch.Tensor]:
    """What `ForwardBatch.segments` holds, for segments of `extend` tokens, int64[n]."""
    arrays = [starts_of(extend), batch.prefix_lens_host[: batch.num_extend]]
    return Staging(batch.rows.device).upload(arrays)


def _together(batch: ForwardBatch, starts: torch.Tensor) -> _Segments:
    """Segments that share all places which are no decode row's."""
    assert batch.prefix_lens is not None, "what only the device knows comes together"
    tokens = len(batch.input_ids) - (len(batch.rows) - batch.num_extend)
    return _Segments(starts, batch.prefix_lens, tokens, tokens, shared=True)


def _grid(batch: ForwardBatch, prefixes: torch.Tensor) -> _Segments:
    """A segment for each row, as long as the grid is wide. Its length ends it, on the device."""
    width, tokens = batch.grid_width, len(batch.input_ids)
    return _Segments(torch.arange(0, tokens, width, device=prefixes.device), prefixes, width, tokens)
