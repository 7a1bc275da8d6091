"""Chunks of which only the device knows the lengths, as backends that are `mixed_safe` must compute them.

What is marked `interpreted` runs in the process of `test_triton.py`, and on a CUDA device.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from core.attention.base import MOST_CHUNKS, AttentionBackend
from core.attention.registry import build_attention
from core.batch.forward_batch import ForwardBatch
from core.memory.kv_e4m3 import FP8_E4M3
from tests.support.fakes.grid_attention import MixedAttention
from tests.support.fakes.paged_steps import Part
from tests.support.fakes.traced_graphs import TracedGraphs
from tests.support.interpreted import quick_calls
from tests.unit.core.attention.dense import LAYER, KnownRows, Shape, rename_pages
from tests.unit.core.attention.test_conformance import DEVICE, INTERPRETED, SHAPES, TOLERANCE
from tests.unit.core.attention.test_triton import interpreted, needs_triton, spoil_unseen
from tests.unit.core.attention.test_triton_tiles import spoilt

__all__ = ["spoilt"]

NO_LENGTHS = np.empty(0, np.int64)
MAX_LEN, ROWS = 60, 7

Mix = tuple[Sequence[Part], Sequence[Part]]
"""(chunks, decode rows)."""
Size = tuple[int, int, int]
"""Places for tokens of chunks, for chunks and for decode rows."""


@pytest.fixture(autouse=True)
def quick(spoilt: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted functions call each other in a fourth of the time. New memory is NaN until it is written."""
    if INTERPRETED:
        quick_calls(monkeypatch)


def laid_out(mix: Mix, size: Size) -> list[Part | None]:
    """By place in T: the one token that stands there; None for padding."""
    chunks, decodes = mix
    places: list[Part | None] = [Part(c.row, c.prefix + i, 1) for c in chunks for i in range(c.extend)]
    places += [None] * (size[0] - len(places)) + list(decodes)
    return places + [None] * (size[0] + size[2] - len(places))


def mixed_batch(rows: KnownRows, mix: Mix, size: Size) -> ForwardBatch:
    """The step of `mix` with padding up to `size`, of which the host knows the sizes alone."""
    (chunks, decodes), device = mix, rows.paged.pool.device
    batch = rows.paged.batch([each or Part(0, 0, 1) for each in laid_out(mix, size)], 0)
    none = [Part(0, 0, 0)] * (size[1] - len(chunks))
    named = [*chunks, *none, *decodes, *[Part(0, 0, 1)] * (size[2] - len(decodes))]
    batch.rows = torch.tensor([part.row for part in named], device=device)
    batch.seq_lens = torch.tensor([part.prefix + part.extend for part in named], device=device)
    batch.prefix_lens = torch.tensor([part.prefix for part in named[: size[1]]], device=device)
    batch.starts = torch.tensor(np.cumsum([0, *(part.extend for part in named[: size[1]])]), device=device)
    batch.num_extend, batch.prefix_lens_host, batch.extend_lens_host = size[1], NO_LENGTHS, NO_LENGTHS
    return batch


def packed(rows: KnownRows, mix: Mix, size: Size) -> list[torch.Tensor]:
    """Queries, keys and values of all places; those of padding are of row 0."""
    places = [each or Part(0, 0, 1) for each in laid_out(mix, size)]
    return [torch.stack([source[p.row, p.prefix] for p in places], dim=1) for source in (rows.q, rows.k, rows.v)]


def check_output(rows: KnownRows, out: torch.Tensor, mix: Mix, size: Size) -> None:
    """Real places are as the formula says, all others finite."""
    assert out.isfinite().all(), "what does not count goes on to slot 0"
    real = [place for place, part in enumerate(laid_out(mix, size)) if part is not None]
    error = (out[real].double() - rows.expected([*mix[0], *mix[1]])).abs().max().item()
    assert error < TOLERANCE[rows.shape.dtype], (error, mix, size)


def check_mix(rows: KnownRows, backend: AttentionBackend, mix: Mix, size: Size, spoils: bool = False) -> None:
    """One step of `mix` through `backend`."""
    parts = [*mix[0], *mix[1]]
    rows.fill(parts)
    if spoils:
        spoil_unseen(rows, parts)
    batch, shape = mixed_batch(rows, mix, size), rows.shape
    if shape.renamed:
        rename_pages(batch, rows.seed)
    backend.plan(batch)
    spans: dict[str, Any] = {"sliding_window": shape.window, "chunk_size": shape.chunk}
    spans |= {"softcap": shape.softcap, "sinks": rows.sinks}
    check_output(rows, backend.forward(LAYER, *packed(rows, mix, size), scale=rows.scale, **spans), mix, size)


def draw_mix(draw: random.Random, tokens: int, chunks: int, decodes: int) -> Mix:
    """Up to so many; of the chunks some begin a prompt, and some have much before them."""
    rows = draw.sample(range(1, ROWS + 1), ROWS)
    segments, room = list[Part](), tokens
    for _ in range(draw.randint(0, chunks)):
        if room:
            extend = draw.randint(1, room) if draw.random() < 0.3 else min(room, draw.randint(1, 6))
            segments.append(Part(rows.pop(), draw.choice([0, 0, 1, draw.randint(0, MAX_LEN - extend)]), extend))
            room -= extend
    count = min(len(rows), draw.randint(0 if segments else 1, decodes))
    return segments, [Part(rows.pop(), draw.randint(0, MAX_LEN - 1), 1) for _ in range(count)]


def known(shape: Shape, seed: int) -> KnownRows:
    return KnownRows(shape, ROWS, MAX_LEN, page_size=4, seed=seed, device=DEVICE)


MIXES: list[Mix] = [
    ([Part(1, 0, 40)], [Part(2, 30, 1)]),
    ([Part(1, 0, 3), Part(2, 40, 17), Part(3, 0, 1), Part(4, 16, 16)], [Part(5, 0, 1), Part(6, 59, 1)]),
    ([Part(7, 5, 16), Part(6, 9, 16)], []),
    ([], [Part(3, 20, 1)]),
]


def test_the_formula_of_the_tests_computes_mixes() -> None:
    for shape in (Shape(), Shape(window=5), Shape(chunk=8, softcap=2.0), Shape(sinks=True), Shape(renamed=True)):
        for mix in MIXES:
            check_mix(known(shape, 1), MixedAttention(), mix, (40, 4, 3))


def tiles(monkeypatch: pytest.MonkeyPatch, multiprocessors: int, packed_lines: int) -> None:
    """Small ones. None is packed with `packed_lines` 0, and none split with `multiprocessors` 0."""
    from core.attention.triton.tiles import Tiles

    chosen = Tiles(multiprocessors, block_m=16, block_n=16, split_least=16, packed=packed_lines)
    monkeypatch.setattr("core.attention.triton.backend.Tiles.of", lambda *_: chosen)


@needs_triton
@interpreted
@pytest.mark.parametrize("mix", MIXES, ids=["long", "many", "even", "none"])
@pytest.mark.parametrize("packed_lines", [0, 64], ids=["one-head", "packed"])
def test_interpreted_mixes_match_the_formula(packed_lines: int, mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of 16 queries of one head, or of 64 lines of all heads of a KV head with their keys split."""
    tiles(monkeypatch, 3, packed_lines)
    backend = build_attention("triton", torch.device(DEVICE))
    assert backend.mixed_safe
    check_mix(known(Shape(heads=2, kv_heads=1, sinks=True), 2), backend, mix, (40, 4, 3), spoils=True)


NAMES = "mqa narrow-values-gqa latent-window window-and-chunk softcap-sinks-chunk renamed-window".split()


@needs_triton
@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_interpreted_random_mixes_match_the_formula(name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    tiles(monkeypatch, draw.choice([0, 3, 64]), draw.choice([0, 16, 64]))
    tokens, chunks = draw.choice([1, 7, 24, 40]), draw.randint(1, 5)
    mix = draw_mix(draw, tokens, chunks, 2)
    backend = build_attention("triton", torch.device(DEVICE))
    check_mix(known(SHAPES[name], seed), backend, mix, (tokens, chunks + draw.randint(0, 3), 2))


@needs_triton
@interpreted
@pytest.mark.parametrize("stored", [{}, {"format": FP8_E4M3, "dtype": torch.bfloat16}], ids=["numbers", "codes"])
def test_interpreted_mixes_can_be_captured(stored: dict[str, Any]) -> None:
    """Recorded once on padding, replayed with other chunks in the same memory: one, or as many as there may be."""
    size, rows = (24, 6, 2), known(Shape(heads=2, kv_heads=1, **stored), 9)
    backend: Any = build_attention("triton", torch.device(DEVICE))
    batch = mixed_batch(rows, ([], []), size)
    held = [torch.zeros_like(each) for each in packed(rows, ([], []), size)]
    out = torch.zeros(size[0] + size[2], 2, 16, device=DEVICE, dtype=rows.shape.dtype)

    def work() -> None:
        backend.plan(batch)
        out.copy_(backend.forward(LAYER, *held, scale=rows.scale))

    with torch.inference_mode():
        graph = TracedGraphs().capture(work)
    many: Mix = [Part(row, 3 * row, 4) for row in (1, 2, 3, 4, 5, 6)], [Part(7, 30, 1)]
    one: Mix = [Part(2, 11, 24)], []
    for mix in (many, one, ([], [Part(1, 9, 1), Part(2, 0, 1)])):
        rows.fill([*mix[0], *mix[1]])
        real = mixed_batch(rows, mix, size)
        for name in ("rows", "seq_lens", "prefix_lens", "starts", "positions", "out_cache_loc"):
            getattr(batch, name).copy_(getattr(real, name))
        for memory, source in zip(held, packed(rows, mix, size), strict=True):
            memory.copy_(source)
        graph.replay()
        check_output(rows, out, mix, size)


def division(draw: random.Random, total: int, count: int) -> list[int]:
    """`total` in `count` parts, some of them empty."""
    cuts = sorted(draw.choice([0, total, draw.randint(0, total)]) for _ in range(count - 1))
    return np.diff([0, *cuts, total]).tolist()


@needs_triton
@interpreted
@pytest.mark.parametrize("pack", [1, 3, 8])
def test_interpreted_each_tile_of_any_division_is_found_once(pack: int, seed: int) -> None:
    """There are tiles enough for any division, none is found twice, and what is left over is behind a segment's end."""
    from tests.support.fakes.tile_finder import tiles_of_places

    draw = random.Random(f"{pack} {seed}")
    for count in (1, MOST_CHUNKS, *(draw.randint(2, 9) for _ in range(4))):
        total, lines = draw.randint(0, 90), draw.choice([16, 32, 64])
        extends = division(draw, total, count)
        places = -(-total * pack // lines) + draw.randint(0, 2) + count - 1
        wanted = {(i, tile) for i, extend in enumerate(extends) for tile in range(-(-extend * pack // lines))}
        found = tiles_of_places(torch.tensor(np.cumsum([0, *extends]), device=DEVICE), places, pack, lines)
        inside = [(i, tile) for i, tile in found if tile * lines < extends[i] * pack]
        assert sorted(inside) == sorted(wanted), (extends, lines)
        assert all(tile >= 0 for _, tile in found)
