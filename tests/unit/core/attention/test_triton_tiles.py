"""Short segments in packed tiles, with their keys split: what is chosen, and that it attends as one head a tile does.

What is marked `interpreted` runs in the process of `test_triton.py`, and on a CUDA device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from core.attention.registry import build_attention
from tests.support.fakes.paged_steps import Part
from tests.support.fakes.traced_graphs import TracedGraphs
from tests.unit.core.attention.dense import LAYER, KnownRows, Shape
from tests.unit.core.attention.test_conformance import DEVICE, SHAPES, TOLERANCE
from tests.unit.core.attention.test_triton import interpreted, needs_triton, spoil_unseen

if TYPE_CHECKING:
    from core.attention.triton.tiles import Tiles

pytestmark = needs_triton

PACKED = (
    "mha mqa wide-gqa narrow-values-gqa latent-window window-of-one window-and-chunk sinks-window "
    "softcap-sinks-chunk bf16-sinks bf16-narrow-values renamed-window"
).split()

CPU = torch.device("cpu")

Attend = Callable[["Tiles", KnownRows, Sequence[Part]], torch.Tensor]


def tiles(multiprocessors: int, packed: int) -> Tiles:
    """Small ones. None is packed with `packed` 0, and none split with `multiprocessors` 0."""
    from core.attention.triton.tiles import Tiles

    return Tiles(multiprocessors, block_m=16, block_n=16, split_least=16, packed=packed)


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Attend:
    """One step of segments through a backend with the tiles of one's choice."""

    def step(chosen: Tiles, rows: KnownRows, parts: Sequence[Part]) -> torch.Tensor:
        monkeypatch.setattr("core.attention.triton.backend.Tiles.of", lambda *_: chosen)
        return rows.attend(build_attention("triton", torch.device(DEVICE)), parts, num_extend=len(parts))

    return step


@pytest.fixture
def spoilt() -> Iterator[None]:
    """New memory is NaN until something is written there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def segments(draw: random.Random, longest: int, max_len: int) -> list[Part]:
    """Three short ones: nothing before one of them, much before another."""
    extends = [draw.randint(1, longest), longest, draw.randint(1, longest)]
    prefixes = [0, draw.randint(max_len // 2, max_len - longest), draw.randint(1, max_len - longest)]
    rows = draw.sample(range(1, 5), 3)
    return [Part(row, prefix, extend) for row, prefix, extend in zip(rows, prefixes, extends, strict=True)]


@interpreted
@pytest.mark.parametrize("name", PACKED)
def test_interpreted_packed_tiles_attend_as_one_head_a_tile(name: str, attend: Attend, spoilt: None, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    shape = SHAPES[name]
    rows = KnownRows(shape, num_rows=4, max_len=40, page_size=4, seed=seed, device=DEVICE)
    parts = segments(draw, draw.randint(2, 6), rows.max_len)
    rows.fill(parts)
    before = attend(tiles(0, 0), rows, parts)
    for multiprocessors, packed in ((0, 16), (2, 32), (64, 64)):
        got = attend(tiles(multiprocessors, packed), rows, parts)
        for wanted in (before.double(), rows.expected(parts)):
            error = (got.double() - wanted).abs().max().item()
            assert error < TOLERANCE[shape.dtype], (error, packed, multiprocessors, parts)


@interpreted
def test_interpreted_segments_of_any_length_in_packed_tiles(attend: Attend, spoilt: None, seed: int) -> None:
    """Groups of three heads: some tile begins within the lines of a query, and most segments end within a tile."""
    draw = random.Random(seed)
    shape = Shape(heads=3, kv_heads=1, k_dim=24, v_dim=8)
    rows = KnownRows(shape, num_rows=1, max_len=80, page_size=16, seed=seed, device=DEVICE)
    for extend in draw.sample(range(1, 41), 8):
        parts = [Part(1, draw.choice((0, 0, 1, 25)), extend)]
        rows.fill(parts)
        got = attend(tiles(draw.choice((0, 0, 0, 1)), 64), rows, parts)
        assert (got.double() - rows.expected(parts)).abs().max() < TOLERANCE[shape.dtype], parts


@interpreted
def test_interpreted_more_splits_than_are_merged_at_a_time(attend: Attend, spoilt: None, seed: int) -> None:
    rows = KnownRows(Shape(heads=2, kv_heads=1), num_rows=1, max_len=160, page_size=16, seed=seed, device=DEVICE)
    parts = [Part(1, 157, 3)]
    rows.fill(parts)
    got = attend(tiles(64, 16), rows, parts)
    assert (got.double() - rows.expected(parts)).abs().max() < TOLERANCE[torch.float32]


def test_no_number_of_splits_and_no_place_of_an_upload_needs_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels: one for the rows of a decode step, one for segments."""
    from core.attention.triton.splits import Segments, Splits, merge
    from tests.support.fakes.compiled_kernels import compiling

    upload = torch.zeros(9, dtype=torch.int64)
    with compiling(monkeypatch) as kernels:
        for count in (2, 3, 16, 33):
            parts, out = Splits.empty(1, 2, count, 8, CPU), torch.empty(1, 2, 8)
            merge(parts, None, out)
            for at, longest in ((0, 2), (1, 16), (2, 17)):
                merge(parts, None, out, Segments(upload[at:][:1], upload[at + 1 :][:1], upload[at + 2 :][:1], longest))
    assert kernels.launches["_merge_splits"] == 16 and len(kernels.keys["_merge_splits"]) == 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@interpreted
def test_interpreted_more_splits_than_are_compared_at_a_time() -> None:
    """The first 128 have seen no key; what those behind have seen is all there is."""
    from core.attention.triton.splits import COMPARED, Splits, merge

    count = COMPARED.value + 3
    sums = torch.full((1, 2, count, 8), torch.nan, device=DEVICE)
    peaks = torch.full((1, 2, count), -torch.inf, device=DEVICE)
    totals = torch.zeros((1, 2, count), device=DEVICE)
    for place, peak in ((-3, 1.0), (-1, 300.0)):
        sums[..., place, :], peaks[..., place], totals[..., place] = 6.0, peak, 2.0
    out = torch.empty(1, 2, 8, device=DEVICE)
    merge(Splits(sums, peaks, totals), None, out)
    assert (out == 3.0).all()


def test_rehearsed_steps_have_all_heights_and_no_more_rows_than_there_are() -> None:
    from core.attention.triton.tiles import rehearsed

    for rows, crowd in ((1, 1), (24, 24), (1000, 4 * 132)):
        steps = rehearsed(rows, 132)
        assert steps[0] == [], "a decode step"
        assert {len(lens) for lens in steps[1:]} == {1, crowd}
        assert {max(lens) for lens in steps[1:]} == {1, 2, 4, 8, 16, 32, 64, 65}


def test_what_is_rehearsed_is_for_the_device_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = build_attention("triton", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=3))
    assert max(map(len, backend.rehearsals(99, torch.device("cuda"))), default=0) == 4 * 3
    assert backend.rehearsals(99, torch.device("cpu")) == []


@interpreted
@pytest.mark.parametrize("window", [None, 5])
def test_interpreted_packed_tiles_read_no_key_that_is_hidden_from_all(
    window: int | None, attend: Attend, spoilt: None
) -> None:
    rows = KnownRows(Shape(window=window), num_rows=4, max_len=60, page_size=4, seed=3, device=DEVICE)
    parts = [Part(1, 0, 3), Part(4, 50, 4), Part(2, 37, 1)]
    rows.fill(parts)
    spoil_unseen(rows, parts)
    for multiprocessors in (0, 64):
        got = attend(tiles(multiprocessors, 16), rows, parts)
        assert (got.double() - rows.expected(parts)).abs().max() < TOLERANCE[torch.float32]


@interpreted
@pytest.mark.parametrize("multiprocessors", [0, 64])
def test_interpreted_packed_tiles_can_be_captured(multiprocessors: int) -> None:
    """Recorded once on padding of four places a row, replayed with other rows and prefixes, and with fewer places."""
    from core.attention.triton.extend import paged_extend

    rows = KnownRows(Shape(sinks=True), num_rows=4, max_len=60, page_size=4, seed=5, device=DEVICE)
    keys, values = rows.paged.pool.k(LAYER), rows.paged.pool.v(LAYER)
    where: Any = [torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(4)]
    table_rows, lens, starts, prefixes = where
    lens.fill_(1)
    starts.copy_(torch.tensor([0, 4]))
    q = torch.zeros(4, 8, 16, device=DEVICE)
    out = torch.full((8, 4, 16), 7.0, device=DEVICE)
    tile = tiles(multiprocessors, 16).extend(4, 2, 4, 2, rows.paged.table.shape[1])
    assert tile.pack == 2 and (tile.splits > 1) == (multiprocessors > 0)

    def work() -> None:
        paged = (keys, values, rows.paged.table, None)
        paged_extend(out, q, *paged, *where, 4, rows.sinks, rows.scale, 0.0, 0, 0, 4, *tile)

    with torch.inference_mode():
        graph = TracedGraphs().capture(work)
    for parts in ([Part(3, 0, 4), Part(1, 55, 4)], [Part(2, 30, 2), Part(4, 17, 4)], [Part(1, 9, 1), Part(2, 0, 3)]):
        rows.fill([Part(part.row, part.prefix + part.extend, 0) for part in parts])
        table_rows.copy_(torch.tensor([part.row for part in parts]))
        prefixes.copy_(torch.tensor([part.prefix for part in parts]))
        lens.copy_(torch.tensor([part.prefix + part.extend for part in parts]))
        for index, part in enumerate(parts):
            own = rows.q[part.row, part.prefix : part.prefix + part.extend]
            q[:, 4 * index : 4 * index + part.extend] = own.transpose(0, 1)
        out.fill_(7)
        graph.replay()
        assert (out == 7).all(dim=(1, 2)).sum() == 8 - sum(part.extend for part in parts), "places without a token"
        got = torch.cat([out[4 * index : 4 * index + part.extend] for index, part in enumerate(parts)])
        assert (got.double() - rows.expected(parts)).abs().max() < TOLERANCE[torch.float32], parts


@pytest.mark.parametrize(
    ("longest", "segments", "heads", "kv_heads", "width", "tile"),
    [
        pytest.param(2, 1, 32, 8, 32768, (4, 16, 64, 66, 128), id="one-draft"),
        pytest.param(5, 1, 32, 8, 32768, (4, 32, 64, 66, 128), id="four-drafts"),
        pytest.param(16, 4, 32, 8, 32768, (4, 64, 64, 17, 128), id="fifteen-drafts-of-four-rows"),
        pytest.param(4, 64, 32, 8, 32768, (4, 16, 64, 2, 128), id="many-rows"),
        pytest.param(4, 66, 32, 8, 32768, (4, 16, 64, 1, 128), id="rows-enough-for-the-device"),
        pytest.param(17, 1, 32, 8, 32768, (4, 64, 64, 33, 128), id="two-tiles"),
        pytest.param(3, 1, 8, 8, 1000, (1, 16, 64, 8, 128), id="no-groups-in-a-short-table"),
        pytest.param(5, 1, 128, 1, 65536, (128, 64, 64, 53, 128), id="ten-tiles-of-one-kv-head"),
        pytest.param(64, 1, 28, 4, 32768, (7, 64, 64, 19, 128), id="as-long-as-is-packed"),
        pytest.param(65, 1, 28, 4, 32768, (1, 128, 64, 1, 128), id="longer"),
    ],
)
def test_tiles_of_a_large_gpu(
    longest: int, segments: int, heads: int, kv_heads: int, width: int, tile: tuple[int, ...]
) -> None:
    from core.attention.triton.tiles import Tiles

    hopper = Tiles(132, block_m=128, block_n=64, split_least=128, packed=64)
    assert hopper.extend(longest, segments, heads, kv_heads, width) == tile


def test_packed_tiles_read_keys_no_more_often_than_one_head_a_tile() -> None:
    from core.attention.triton.tiles import Tiles

    for block_m in (16, 64, 128):
        sizes = Tiles(132, block_m, block_n=32, split_least=128, packed=64)
        for group in (1, 2, 3, 4, 5, 7, 8, 16, 128):
            for longest in range(1, 65):
                tile = sizes.extend(longest, 1, group, 1, 4096)
                assert tile.pack == group
                assert -(-longest * group // tile.block_m) <= group * -(-longest // block_m)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "v_dim", "tile"),
    [
        pytest.param(32, 8, 128, (16, 64, 2, 5, 64), id="llama"),
        pytest.param(128, 1, 512, (32, 64, 8, 17, 128), id="latents"),
        pytest.param(128, 1, 128, (64, 64, 4, 33, 128), id="one KV head"),
        pytest.param(8, 8, 64, (16, 64, 2, 5, 64), id="one head each"),
        pytest.param(16, 8, 256, (16, 64, 4, 9, 128), id="wide heads"),
    ],
)
def test_decode_tiles_of_a_large_gpu(heads: int, kv_heads: int, v_dim: int, tile: tuple[int, ...]) -> None:
    """Eight rows: four programs for each of 132 multiprocessors, however a KV head's query heads are parted.

    Two, of few warps, where a tile is narrow.
    """
    from core.attention.triton.tiles import Tiles

    hopper = Tiles(132, block_m=128, block_n=64, split_least=128, packed=64)
    assert hopper.decode(8, heads, kv_heads, v_dim, 32768) == tile
