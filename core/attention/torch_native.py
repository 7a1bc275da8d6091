"""Attention with PyTorch alone: the backend of the CPU, and the reference on every other device.

It gathers a few rows into a reused workspace, and folds the query heads of one KV head into the query length. Measured
on a CPU that is faster than loops, `enable_gqa` and compiled kernels, and slower only than hand-written kernels.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from core.attention.base import AttentionBackend
from core.attention.explicit import explicit_attention
from core.attention.relative_bias import RelativeBias
from core.attention.span import AttentionSpan
from core.attention.span_plan import DecodeChunk, PrefillPiece, SpanPlan, build_span_plan
from core.batch.forward_batch import ForwardBatch
from core.memory.kv_format import KVFormat
from core.memory.kv_pool import KVPool


class TorchNativeAttention(AttentionBackend):
    """Loops over prefill segments, and over chunks of decode rows gathered into one padded batch.

    Reads every `KVFormat` by its own operations on tensors.
    """

    @classmethod
    def why_not_stored(cls, format: KVFormat, dtype: torch.dtype) -> str | None:
        """See `AttentionBackend`: every format is read."""
        return None

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._plans: dict[AttentionSpan, SpanPlan] = {}
        self._keys = _Workspace()
        self._values = _Workspace()

    def plan(self, batch: ForwardBatch) -> None:
        """Remember the step. Indices and masks are made when the first layer with a span needs them."""
        assert len(batch.prefix_lens_host) == len(batch.extend_lens_host) == batch.rows.shape[0]
        assert int(batch.extend_lens_host.sum()) == batch.out_cache_loc.shape[0]
        self._batch = batch
        self._plans.clear()

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
        """Write keys and values, then attend segment by segment and chunk by chunk; [T, H, Dv]."""
        batch = self._batch
        assert batch is not None, "plan() comes first"
        assert q.shape[1] == k.shape[1] == v.shape[1] == batch.out_cache_loc.shape[0]
        assert q.shape[0] % k.shape[0] == 0, (q.shape[0], k.shape[0])
        if not stored:
            batch.kv_pool.write(layer_id, batch.out_cache_loc, k.transpose(0, 1), v.transpose(0, 1))
        plan = self._plan_for(AttentionSpan(sliding_window, chunk_size), batch)
        call = _LayerCall(layer_id, batch, scale, softcap, sinks, bias)
        assert bias is None or (q.shape[0] == k.shape[0] and not call.explicit), "a bias is per KV head, and goes alone"
        if plan.in_order and plan.decodes:
            return self._decode(plan.decodes[0], call, q.transpose(0, 1))
        if len(plan.prefills) == 1 and not plan.decodes:
            return self._prefill(plan.prefills[0], call, q, k, v).contiguous()
        out = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
        for piece in plan.prefills:
            out[piece.start : piece.end] = self._prefill(piece, call, q, k, v)
        if plan.decodes:
            by_token = q.transpose(0, 1)
            for chunk in plan.decodes:
                out.index_copy_(0, chunk.tokens, self._decode(chunk, call, by_token.index_select(0, chunk.tokens)))
        return out

    def _plan_for(self, span: AttentionSpan, batch: ForwardBatch) -> SpanPlan:
        found = self._plans.get(span)
        if found is None:
            found = self._plans[span] = build_span_plan(batch, span, batch.kv_pool.dtype)
        return found

    def _prefill(
        self, piece: PrefillPiece, call: _LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """[t, H, Dv] of one segment of t tokens."""
        queries = q[:, piece.start : piece.end]
        slots = piece.slots
        if slots is None and call.batch.kv_pool.format.codes is not None:
            # The step's own are read back: later steps see what the codes say, and so does this one.
            slots = call.batch.out_cache_loc[piece.start : piece.end]
        if slots is None:
            keys, values = k[:, piece.start : piece.end], v[:, piece.start : piece.end]
        else:
            keys, values = (gathered.transpose(0, 1) for gathered in self._gather(call, slots))
        if not call.explicit:
            mask = piece.mask if call.bias is None else call.biased_prefill(piece, queries)
            attended = scaled_dot_product_attention(
                queries[None],
                keys[None],
                values[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=call.scale,
                enable_gqa=q.shape[0] != k.shape[0],
            )
            return attended[0].transpose(0, 1)
        # One batch entry per KV head, with its query heads beside each other, so that the keys broadcast.
        folded = queries.unflatten(0, (k.shape[0], -1))
        sinks = None if call.sinks is None else call.sinks.view(k.shape[0], -1, 1, 1)
        mask = piece.dense_mask(queries)
        return call.write_out(folded, keys[:, None], values[:, None], mask, sinks).flatten(0, 1).transpose(0, 1)

    def _decode(self, chunk: DecodeChunk, call: _LayerCall, q: torch.Tensor) -> torch.Tensor:
        """[b, H, Dv] of b rows with one query each, q [b, H, D]."""
        gathered = self._gather(call, chunk.slots)
        keys, values = (slots.view(chunk.rows, chunk.length, *slots.shape[1:]).transpose(1, 2) for slots in gathered)
        # The query heads of one KV head become its query length: keys are read once for all of them.
        folded = q.unflatten(1, (keys.shape[1], -1))
        if call.explicit:
            sinks = None if call.sinks is None else call.sinks.view(1, keys.shape[1], -1, 1)
            attended = call.write_out(folded, keys, values, chunk.mask, sinks)
        else:
            mask = chunk.mask if call.bias is None else call.biased_decode(chunk, q)
            attended = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=call.scale)
        return attended.flatten(1, 2)

    def _gather(self, call: _LayerCall, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [L, Hkv, D] and values [L, Hkv, Dv] at `slots`; good until the next call."""
        pool, number = call.batch.kv_pool, call.layer_id
        keys = _decoded(pool, self._keys.take(pool.k(number), slots), pool.k_scales(number), slots)
        if pool.v_in_k(number):
            return keys, keys[..., : pool.v(number).shape[-1]]
        return keys, _decoded(pool, self._values.take(pool.v(number), slots), pool.v_scales(number), slots)


def _decoded(pool: KVPool, found: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """What the `pool` has at `slots`, [L, Hkv, D], as numbers of its dtype; `found` where it stores these."""
    codes = pool.format.codes
    if codes is None:
        return found
    assert scales is not None, "codes have scales"
    return codes.decode(found, scales.index_select(0, slots), pool.dtype)


class _LayerCall:
    """The arguments of one `forward` call that all segments share."""

    __slots__ = ("batch", "bias", "explicit", "layer_id", "scale", "sinks", "softcap")

    def __init__(
        self,
        layer_id: int,
        batch: ForwardBatch,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        bias: RelativeBias | None,
    ) -> None:
        self.layer_id = layer_id
        self.batch = batch
        self.scale = scale
        self.softcap = softcap
        self.sinks = sinks
        self.bias = bias
        self.explicit = softcap is not None or sinks is not None

    def biased_prefill(self, piece: PrefillPiece, queries: torch.Tensor) -> torch.Tensor:
        """[H, t, L]: mask and bias of one segment; key 0 is the first, because a bias comes without a window."""
        assert self.bias is not None
        positions = torch.arange(piece.prefix + queries.shape[1], device=queries.device)
        bias = self.bias(positions[piece.prefix :, None], positions[None, :])
        return bias.permute(2, 0, 1).to(queries.dtype) + piece.dense_mask(queries)

    def biased_decode(self, chunk: DecodeChunk, q: torch.Tensor) -> torch.Tensor:
        """[b, H, 1, L]: mask and bias of b rows with one query each."""
        assert self.bias is not None
        places = self.batch.positions.index_select(0, chunk.tokens)
        bias = self.bias(places[:, None], torch.arange(chunk.length, device=q.device)[None, :])
        mask = bias.permute(0, 2, 1)[:, :, None, :].to(q.dtype)
        return mask if chunk.mask is None else mask + chunk.mask

    def write_out(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        return explicit_attention(q, k, v, mask=mask, scale=self.scale, softcap=self.softcap, sinks=sinks)


class _Workspace:
    """A buffer that only grows. A fresh one per layer would cost as much as the attention itself, in page faults."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take(self, source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """source[slots], [n, heads, dim], in reused memory that the next call overwrites."""
        shape = (slots.shape[0], *source.shape[1:])
        size = shape[0] * shape[1] * shape[2]
        buffer = self._buffer
        if buffer is None or buffer.numel() < size or buffer.dtype != source.dtype or buffer.device != source.device:
            # Half as much again, since every decode step asks for a little more. Inference mode is off because a tensor
            # made inside it could not be written outside later.
            with torch.inference_mode(False):
                buffer = self._buffer = torch.empty(size + size // 2, dtype=source.dtype, device=source.device)
        return torch.index_select(source, 0, slots, out=buffer[:size].view(shape))
