"""Grids, as backends that are `grid_safe` must compute them: rows of one width, lengths on the device alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from tests.support.fakes.grid_attention import GridAttention
from tests.support.fakes.paged_steps import Part
from tests.unit.core.attention.dense import LAYER, KnownRows, Shape, rename_pages

WIDTH = 4
NO_LENGTHS = np.empty(0, np.int64)


def full(parts: Sequence[Part]) -> list[Part]:
    """`parts` with every place of the grid."""
    return [replace(part, extend=WIDTH) for part in parts]


def grid_batch(rows: KnownRows, parts: Sequence[Part]) -> ForwardBatch:
    """A step of which the host knows the width alone; what does not count goes to slot 0."""
    device = rows.paged.pool.device
    exact = rows.paged.batch(parts, len(parts))
    batch = rows.paged.batch(full(parts), len(parts))
    counts = torch.tensor([[place < part.extend for place in range(WIDTH)] for part in parts], device=device).view(-1)
    batch.positions = torch.where(
        counts, batch.positions, batch.positions.view(-1, WIDTH)[:, :1].expand(-1, WIDTH).reshape(-1)
    )
    batch.out_cache_loc = batch.out_cache_loc * counts
    batch.seq_lens, batch.grid_width = exact.seq_lens, WIDTH
    batch.prefix_lens = torch.tensor([part.prefix for part in parts], device=device)
    batch.prefix_lens_host = NO_LENGTHS
    return batch


def packed(rows: KnownRows, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of all places."""
    q, k, v = (
        torch.cat([source[p.row, p.prefix : p.prefix + WIDTH] for p in parts]).transpose(0, 1)
        for source in (rows.q, rows.k, rows.v)
    )
    return q, k, v


def check_grid(rows: KnownRows, backend: AttentionBackend, parts: Sequence[Part], tolerance: float) -> None:
    rows.fill(parts)
    batch = grid_batch(rows, parts)
    if rows.shape.renamed:
        rename_pages(batch, rows.seed)
    backend.plan(batch)
    shape = rows.shape
    spans = {"sliding_window": shape.window, "softcap": shape.softcap, "chunk_size": shape.chunk, "sinks": rows.sinks}
    out = backend.forward(LAYER, *packed(rows, parts), scale=rows.scale, **spans)
    assert out.isfinite().all(), "what does not count goes on to slot 0"
    expected = rows.expected(parts)
    got = torch.cat([out[WIDTH * i : WIDTH * i + part.extend] for i, part in enumerate(parts)])
    assert (got.double() - expected).abs().max() < tolerance
    for part in parts:
        behind = rows.paged.table[part.row, part.prefix + part.extend : part.prefix + WIDTH].to(torch.int64)
        assert (rows.paged.pool.k(LAYER)[behind] == 50.0).all(), "nothing of a row is written behind its length"


PARTS = [Part(3, 17, 2), Part(1, 0, 1), Part(4, 5, 4), Part(2, 30, 3)]


def test_the_formula_of_the_tests_computes_grids() -> None:
    for shape in (Shape(), Shape(window=5), Shape(chunk=8, softcap=2.0), Shape(sinks=True), Shape(renamed=True)):
        check_grid(KnownRows(shape, 4, 40, 4, seed=1), GridAttention(), PARTS, 1e-5)
