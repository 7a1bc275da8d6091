"""Attention over codes whose every call is compared with what the format of the pool says.

Logits over codes differ from those of numbers by what codes cost, and a bar that lets this pass would let a wrong page
pass too. So nothing is compared with numbers as computed. What is stored must be the bytes that the format's own
functions make, in all slots of the pool. What is read must be attention over the numbers of these bytes: each output
may differ by a share of the weights' sum of its own values. Keys, values and queries of that call are drawn, so that
every token has a weight that shows: in those of a model one token may have nearly all of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import torch

from core.attention.base import AttentionBackend
from core.attention.explicit import explicit_attention
from core.attention.relative_bias import RelativeBias
from core.attention.span import AttentionSpan
from core.batch.forward_batch import ForwardBatch
from core.memory.kv_pool import KVPool

SHARE: Final = 2.0**-5
"""Of sum(weight * |value|). Weights and outputs are rounded to bfloat16. Measured at most: 0.005 by PyTorch, 0.011 by
interpreted kernels; by a page of another row 6, and by the scales of the slots before 3.6."""


class WrongCodes(Exception):
    """What a backend does otherwise than the format says, as the middle of a sentence."""


class CheckedCodes(AttentionBackend):
    """Serves by `attention` over a small pool of codes, and raises WrongCodes in the call that is wrong."""

    def __init__(self, attention: AttentionBackend, pool: KVPool) -> None:
        self._serving, self._beside = attention, attention.sibling()
        self._told, self._drawn = _Twins(pool), _Twins(_alike(pool))
        self._generator = torch.Generator().manual_seed(0)
        self._filled: set[int] = set()
        self._batch: ForwardBatch | None = None

    def plan(self, batch: ForwardBatch) -> None:
        """Plan the step, and the same one over the pool of what is drawn."""
        self._batch = dataclasses.replace(batch, kv_pool=self._drawn.pool)
        self._serving.plan(batch)
        # A copy, since a backend may translate its batch in place.
        self._beside.plan(dataclasses.replace(self._batch))

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
        """What the serving backend gives. Raises WrongCodes."""
        batch, twins = self._batch, self._drawn
        assert batch is not None, "plan() comes first"
        assert bias is None, "encoder-decoders have no codes"
        call = _Call(batch, layer_id, scale, AttentionSpan(sliding_window, chunk_size), softcap, sinks)
        out = call.by(self._serving, q, k, v, stored)
        self._told.compare(layer_id, batch.out_cache_loc, k, v)
        if layer_id not in self._filled:
            self._fill(layer_id, k.shape[0], k.shape[2], v.shape[2])
        keys, values = self._numbers(layer_id, k.shape[0], k.shape[1], k.shape[2], v.shape[2])
        queries = (self._draw(*q.shape) * (0.5 / (scale * math.sqrt(q.shape[2])))).to(q)
        found = call.by(self._beside, queries, keys, values, False)
        twins.compare(layer_id, batch.out_cache_loc, keys, values)
        call.compare(found, queries, *twins.numbers(layer_id))
        return out

    def _fill(self, layer_id: int, heads: int, k_dim: int, v_dim: int) -> None:
        """Other numbers in each slot, so that no two pages are alike."""
        self._filled.add(layer_id)
        pool = self._drawn.pool
        slots = torch.arange(pool.page_size, pool.num_slots, device=pool.device)
        keys, values = (each.transpose(0, 1) for each in self._numbers(layer_id, heads, len(slots), k_dim, v_dim))
        for each in (pool, self._drawn.wanted):
            each.write(layer_id, slots, keys, values)

    def _numbers(self, layer_id: int, heads: int, tokens: int, k_dim: int, v_dim: int) -> tuple[torch.Tensor, ...]:
        """Keys [Hkv, T, D] and values [Hkv, T, Dv] whose scales differ from token to token and from head to head."""
        sizes = torch.randint(-1, 2, (2, heads, tokens, 1), generator=self._generator).to(self._told.pool.device)
        keys, values = self._draw(heads, tokens, k_dim), self._draw(heads, tokens, v_dim)
        keys, values = (each * 2.0**size for each, size in zip((keys, values), sizes, strict=True))
        if self._drawn.pool.v_in_k(layer_id):
            values = keys[..., :v_dim]
        dtype = self._told.pool.dtype
        return keys.to(dtype), values.to(dtype)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._told.pool.device)


class _Twins:
    """`pool`, which a backend writes, and `wanted`, which has what the format makes of the same numbers."""

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.wanted = pool, _alike(pool)

    def compare(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raises WrongCodes unless the pool has k [Hkv, T, D] and v [Hkv, T, Dv] at `slots`, all else as it was."""
        self.wanted.write(layer_id, slots, k.transpose(0, 1), v.transpose(0, 1))
        for what in ("k", "v", "k_scales", "v_scales"):
            found, wanted = (getattr(pool, what)(layer_id) for pool in (self.pool, self.wanted))
            if not torch.equal(found, wanted):
                kind = "keys" if what.startswith("k") else "values"
                raise WrongCodes(
                    f"stores other {'scales' if 'scales' in what else 'codes'} of {kind} in layer {layer_id}"
                )

    def numbers(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 keys [slots, Hkv, D] and values [slots, Hkv, Dv]."""
        pool, codes = self.wanted, self.wanted.format.codes
        scales = pool.k_scales(layer_id), pool.v_scales(layer_id)
        assert codes is not None and scales[0] is not None and scales[1] is not None, "a pool of codes"
        keys = codes.decode(pool.k(layer_id), scales[0], torch.float32)
        return keys, codes.decode(pool.v(layer_id), scales[1], torch.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """One call of a layer."""

    batch: ForwardBatch
    layer_id: int
    scale: float
    span: AttentionSpan
    softcap: float | None
    sinks: torch.Tensor | None

    def by(
        self, attention: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stored: bool
    ) -> torch.Tensor:
        """[T, H, Dv] by a backend that has planned the step."""
        # fmt: off
        return attention.forward(
            self.layer_id, q, k, v, scale=self.scale, sliding_window=self.span.window, softcap=self.softcap,
            sinks=self.sinks, chunk_size=self.span.chunk, stored=stored,
        )
        # fmt: on

    def compare(self, found: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raises WrongCodes unless `found` [T, H, Dv] is attention of q [H, T, D] over numbers, [slots, Hkv, D or Dv]
        each."""
        rows = self.batch.rows.repeat_interleave(torch.from_numpy(self.batch.extend_lens_host).to(q.device))
        table = self.batch.req_to_token.index_select(0, rows).long()
        places = torch.arange(table.shape[1], device=q.device)
        seen = self.span.allows(self.batch.positions[:, None], places[None, :])
        mask = torch.zeros(seen.shape, device=q.device).masked_fill(~seen, -torch.inf)[:, None, None, :]
        folded = q.float().transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        sinks = None if self.sinks is None else self.sinks.view(1, keys.shape[1], -1, 1)
        told = keys[table].transpose(1, 2)
        wanted, weighed = (
            explicit_attention(
                folded,
                told,
                each[table].transpose(1, 2),
                mask=mask,
                scale=self.scale,
                softcap=self.softcap,
                sinks=sinks,
            ).flatten(1, 2)
            for each in (values, values.abs())
        )
        if not bool(((found.float() - wanted).abs() <= SHARE * weighed).all()):
            raise WrongCodes(f"reads other numbers in layer {self.layer_id}")


def _alike(pool: KVPool) -> KVPool:
    """An empty pool of the same measures."""
    return KVPool(pool.layers, pool.num_pages, pool.page_size, pool.dtype, pool.device, format=pool.format)
