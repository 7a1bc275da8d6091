"""Attention as the formula says, in float64, one row and one query head at a time; and rows whose KV is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from core.attention.base import AttentionBackend
from core.attention.relative_bias import RelativeBias
from core.attention.span import AttentionSpan
from core.batch.forward_batch import ForwardBatch
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.kv_pool import KVLayerSpec
from tests.support.fakes.paged_steps import PagedRows, Part

LAYER = 5
FARTHEST = 11
"""Where a bias by distance ends: keys that are farther behind have that of this distance."""


@dataclass(frozen=True)
class Shape:
    """One attention layer's make. `sinks` draws one logit per query head."""

    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    v_in_k: bool = False
    renamed: bool = False
    """Whether `req_to_token` names pages otherwise than the pool, so that the batch brings a `page_map`."""
    dtype: torch.dtype = torch.float32
    format: KVFormat = PLAIN


def rename_pages(batch: ForwardBatch, seed: int) -> None:
    """Give every page but padding another name in `req_to_token`, and say in `page_map` which one it is."""
    size, count = batch.kv_pool.page_size, batch.kv_pool.num_pages
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1
    names = torch.cat([torch.zeros(1, dtype=torch.int64), order]).to(batch.req_to_token.device)
    batch.page_map = torch.zeros(count + 1, dtype=torch.int32, device=names.device)
    batch.page_map[names] = torch.arange(count + 1, dtype=torch.int32, device=names.device)
    table = batch.req_to_token
    batch.req_to_token = (names[table // size] * size + table % size).to(table.dtype)


@dataclass
class KnownRows:
    """Rows whose keys, values and queries at every position are known, beside the pool that the backend sees."""

    shape: Shape
    num_rows: int
    max_len: int
    page_size: int
    seed: int
    device: str = "cpu"
    paged: PagedRows = field(init=False)

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(self.seed)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(self.device, shape.dtype)

        rows = self.num_rows + 1
        self.q = draw(rows, self.max_len, shape.heads, shape.k_dim)
        self.k = draw(rows, self.max_len, shape.kv_heads, shape.k_dim)
        self.v = draw(rows, self.max_len, shape.kv_heads, shape.v_dim)
        if shape.v_in_k:
            self.v = self.k[..., : shape.v_dim]
        self.read_k, self.read_v = self._stored(self.k), self._stored(self.v)
        if shape.v_in_k:
            self.read_v = self.read_k[..., : shape.v_dim]
        self.sinks = draw(shape.heads) if shape.sinks else None
        self.scale = 1.5 * shape.k_dim**-0.5
        specs = (KVLayerSpec(LAYER, shape.kv_heads, shape.k_dim, shape.v_dim, shape.v_in_k),)
        self.paged = PagedRows(
            specs,
            self.num_rows,
            self.max_len,
            page_size=self.page_size,
            dtype=shape.dtype,
            seed=self.seed,
            device=self.device,
            format=shape.format,
        )

    def _stored(self, numbers: torch.Tensor) -> torch.Tensor:
        """What a pool says that it holds when it was given `numbers`."""
        codes = self.shape.format.codes
        return numbers if codes is None else codes.decode(*codes.encode(numbers), numbers.dtype)

    def fill(self, parts: Sequence[Part]) -> None:
        """Put the prefixes of `parts` into the pool, as earlier steps would have."""
        for part in parts:
            slots = self.paged.table[part.row, : part.prefix].to(torch.int64)
            self.paged.pool.write(LAYER, slots, self.k[part.row, : part.prefix], self.v[part.row, : part.prefix])

    def attend(self, backend: AttentionBackend, parts: Sequence[Part], num_extend: int) -> torch.Tensor:
        """One step through `backend`: [T, H, Dv]."""
        batch = self.paged.batch(parts, num_extend)
        if self.shape.renamed:
            rename_pages(batch, self.seed)
        backend.plan(batch)

        def packed(source: torch.Tensor) -> torch.Tensor:
            return torch.cat([source[p.row, p.prefix : p.prefix + p.extend] for p in parts]).transpose(0, 1)

        return backend.forward(
            LAYER,
            packed(self.q),
            packed(self.k),
            packed(self.v),
            scale=self.scale,
            sliding_window=self.shape.window,
            softcap=self.shape.softcap,
            sinks=self.sinks,
            chunk_size=self.shape.chunk,
            bias=self._relative_bias() if self.shape.bias else None,
        )

    def _bias(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Scores by distance, others for every head; not linear, because softmax forgives a shift of all queries."""
        apart = (queries - keys).clamp(max=FARTHEST)
        return torch.sin(0.3 * apart[..., None] * torch.arange(1, self.shape.heads + 1, device=keys.device))

    def _relative_bias(self) -> RelativeBias:
        distances = torch.arange(FARTHEST + 1, device=self.device)
        return RelativeBias(self._bias(distances, torch.zeros_like(distances)))

    def expected(self, parts: Sequence[Part]) -> torch.Tensor:
        """What `attend` must return, in float64."""
        return torch.cat([self._row(part) for part in parts])

    def _row(self, part: Part) -> torch.Tensor:
        shape, total = self.shape, part.prefix + part.extend
        queries, keys = torch.arange(part.prefix, total)[:, None], torch.arange(total)[None, :]
        allowed = AttentionSpan(shape.window, shape.chunk).allows(queries, keys).to(self.device)
        out = []
        for head in range(shape.heads):
            kv_head = head // (shape.heads // shape.kv_heads)
            q = self.q[part.row, part.prefix : total, head].double()
            scores = q @ self.read_k[part.row, :total, kv_head].double().T * self.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            if shape.bias:
                scores = scores + self._bias(queries, keys)[..., head].to(scores)
            scores = scores.masked_fill(~allowed, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks[head].double().expand(part.extend, 1)], dim=1)
            weights = torch.softmax(scores, dim=1)[:, :total]
            out.append(weights @ self.read_v[part.row, :total, kv_head].double())
        return torch.stack(out, dim=1)
