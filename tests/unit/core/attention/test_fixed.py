"""The Triton backend of deterministic engines: right by the formula, and a query has the same bits in any step.

What is marked `interpreted` runs in the process of `test_triton.py`, and on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from core.attention.base import AttentionBackend
from core.attention.registry import INVARIANT, build_attention
from tests.support.fakes.paged_steps import Part
from tests.support.fakes.traced_graphs import TracedGraphs
from tests.support.interpreted import quick_calls
from tests.unit.core.attention.dense import LAYER, KnownRows
from tests.unit.core.attention.test_conformance import DEVICE, INTERPRETED, SHAPES, TOLERANCE, check
from tests.unit.core.attention.test_grids import PARTS as GRID_PARTS
from tests.unit.core.attention.test_grids import check_grid
from tests.unit.core.attention.test_mixed_attention import MIXES, check_mix, known
from tests.unit.core.attention.test_triton import interpreted, needs_triton
from tests.unit.core.attention.test_triton_tiles import spoilt

__all__ = ["spoilt"]
pytestmark = needs_triton

NAMES = (
    "wide-gqa narrow-values-gqa latent-window window-and-chunk softcap-sinks-chunk renamed-window codes-bf16-latent"
).split()
LENGTH = 44
STEPS: list[tuple[list[Part], int]] = [
    ([Part(1, 0, LENGTH), Part(2, 0, 5)], 2),
    ([Part(1, 0, 19), Part(2, 5, 39)], 2),
    ([Part(1, 19, 6), Part(2, 31, 1)], 1),
    ([Part(2, 43, 1), Part(1, 25, 1)], 0),
    ([Part(1, 43, 1)], 0),
]
"""Tokens of two rows among others: in long and in short segments, and decoded."""


@pytest.fixture(autouse=True)
def _short_parts(spoilt: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is one block of keys, so that rows have several. New memory is NaN until it is written."""
    from core.attention.triton import fixed_backend

    monkeypatch.setattr(fixed_backend, "PART_BLOCKS", 1)
    if INTERPRETED:
        quick_calls(monkeypatch)


def fixed() -> AttentionBackend:
    return build_attention("triton", torch.device(DEVICE), invariant=True)


def by_place(rows: KnownRows, parts: Sequence[Part], num_extend: int) -> dict[tuple[int, int], torch.Tensor]:
    """What each (row, position) of a step got."""
    rows.fill(parts)
    out = rows.attend(fixed(), parts, num_extend)
    places = [(part.row, part.prefix + i) for part in parts for i in range(part.extend)]
    return dict(zip(places, out, strict=True))


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_interpreted_fixed_parts_give_the_same_bits_in_any_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formula too. With programs for all parts, and with one for all of them."""
    from core.attention.triton import fixed_backend

    rows = KnownRows(SHAPES[name], num_rows=2, max_len=LENGTH, page_size=4, seed=3, device=DEVICE)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for room in (1 << 30, 0):
        monkeypatch.setattr(fixed_backend, "LEFT_BYTES", room)
        for parts, num_extend in STEPS:
            for place, got in by_place(rows, parts, num_extend).items():
                assert torch.equal(got, seen.setdefault(place, got)), (place, room)
    check(rows, fixed(), STEPS[1][0], 2)


@interpreted
def test_interpreted_fixed_parts_compute_grids_and_mixes() -> None:
    """Captured steps, whose lengths are on the device alone."""
    backend = fixed()
    assert backend.grid_safe and backend.mixed_safe and backend.graph_safe
    shape = SHAPES["sinks-window"]
    check_grid(KnownRows(shape, 4, 40, 4, seed=1, device=DEVICE), backend, GRID_PARTS, TOLERANCE[shape.dtype])
    check_mix(known(shape, 2), backend, MIXES[1], (40, 4, 3), spoils=True)


@interpreted
def test_interpreted_fixed_parts_are_captured() -> None:
    """A decode step recorded on padding, replayed with other rows and lengths in the same memory."""
    rows, backend = KnownRows(SHAPES["gqa"], 4, 40, 4, seed=5, device=DEVICE), fixed()
    batch = rows.paged.batch([Part(0, 0, 1)] * 3, 0)
    q, k, v = (torch.zeros(heads, 3, 16, device=DEVICE) for heads in (4, 2, 2))
    out = torch.zeros(3, 4, 16, device=DEVICE)

    def work() -> None:
        backend.plan(batch)
        out.copy_(backend.forward(LAYER, q, k, v, scale=rows.scale))

    with torch.inference_mode():
        graph = TracedGraphs().capture(work)
    for parts in ([Part(2, 30, 1), Part(1, 3, 1), Part(3, 17, 1)], [Part(4, 7, 1), Part(2, 31, 1), Part(3, 38, 1)]):
        rows.fill(parts)
        real = rows.paged.batch(parts, 0)
        for name in ("rows", "seq_lens", "positions", "out_cache_loc"):
            getattr(batch, name).copy_(getattr(real, name))
        for held, source in ((q, rows.q), (k, rows.k), (v, rows.v)):
            held.copy_(torch.cat([source[p.row, p.prefix : p.prefix + 1] for p in parts]).transpose(0, 1))
        graph.replay()
        assert torch.equal(out, rows.attend(fixed(), parts, 0))
        assert (out.double() - rows.expected(parts)).abs().max() < TOLERANCE[torch.float32]


def test_only_programs_of_a_launch_depend_on_how_many_rows_there_are() -> None:
    from core.attention.triton.fixed_backend import fixed_tile
    from core.attention.triton.tiles import Tiles

    tiles = Tiles(132, 128, 64, 128, 64)
    sizes = ((1, 1), (1, 256), (20, 1), (65, 1))
    cut = [fixed_tile(tiles, longest, count, 32, 8, 8192, 128) for longest, count in sizes]
    assert len({tile[:4] for tile in cut}) == 1 and [tile.parts for tile in cut] == [128, 1, 128, 1]
    assert fixed_tile(tiles, 40, 0, 32, 8, 8192, 128).parts == 1, "of segments that share places the host knows none"
    half = fixed_tile(tiles, 1, 1, 128, 1, 8192, 512)
    assert half.block_m == 32 and fixed_tile(tiles, 1, 200, 128, 1, 1 << 17, 512).parts == 1, "sums would take 64 MB"


def test_a_backend_has_another_in_its_place_only_where_it_is_asked_for() -> None:
    device = torch.device("cpu")
    assert type(build_attention("auto", device, invariant=True)) is type(build_attention("auto", device))
    assert set(INVARIANT) == {"triton"}
