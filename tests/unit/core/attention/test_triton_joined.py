"""A decode step is one launch: the last of a row's splits to arrive merges them, and leaves no trace of itself.

What is marked `interpreted` runs in the process of `test_triton.py`, and on a CUDA device.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from core.attention.registry import build_attention
from tests.support.fakes.paged_steps import Part
from tests.support.interpreted import quick_calls
from tests.unit.core.attention.dense import KnownRows
from tests.unit.core.attention.test_conformance import DEVICE, INTERPRETED, SHAPES, check
from tests.unit.core.attention.test_triton import interpreted, needs_triton

pytestmark = needs_triton

KEPT_APART: dict[str, tuple[int, int, int, bool]] = {
    "a few heads to a KV head": (32, 8, 128, True),
    "one head to a KV head": (16, 16, 256, True),
    "many heads to a KV head": (64, 1, 128, False),
    "latents": (128, 1, 512, False),
}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        quick_calls(monkeypatch)


@interpreted
@pytest.mark.parametrize("name", ["sinks", "wide-gqa", "softcap", "bf16", "renamed"])
def test_interpreted_last_split_merges_and_counts_from_zero_again(name: str, seed: int) -> None:
    """Rows with one split, with some and with all: step after step, in other orders."""
    draw = random.Random(f"{name} {seed}")
    rows = KnownRows(SHAPES[name], num_rows=4, max_len=60, page_size=4, seed=seed, device=DEVICE)
    backend: Any = build_attention("triton", torch.device(DEVICE))
    for _ in range(2):
        lengths = [1, 16, 17, draw.randint(40, 60)]
        parts = [Part(row, length - 1, 1) for row, length in zip(draw.sample(range(1, 5), 4), lengths, strict=True)]
        check(rows, backend, parts, 0)
        (arrived,) = backend._arrived
        assert not arrived.any(), "as the next step, or the next replay, must find it"


@interpreted
def test_interpreted_one_program_or_two_launches_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.attention.triton.tiles import DecodeTile

    rows = KnownRows(SHAPES["sinks"], num_rows=2, max_len=60, page_size=4, seed=1, device=DEVICE)
    parts = [Part(2, 55, 1), Part(1, 20, 1)]
    rows.fill(parts)
    joined = rows.attend(build_attention("triton", torch.device(DEVICE)), parts, 0)
    monkeypatch.setattr(DecodeTile, "joins", lambda *_: False)
    backend: Any = build_attention("triton", torch.device(DEVICE))
    torch.testing.assert_close(rows.attend(backend, parts, 0), joined, atol=1e-6, rtol=1e-6)
    assert not backend._arrived


@pytest.mark.parametrize("name", KEPT_APART)
def test_where_it_is_too_much_for_one_program_it_stays_two_launches(name: str) -> None:
    from core.attention.triton.tiles import Tiles

    heads, kv_heads, v_dim, joined = KEPT_APART[name]
    tile = Tiles(132, 64, 32, 128, 64).decode(8, heads, kv_heads, v_dim, 32768)
    assert tile.joins(v_dim) == joined


def test_counters_that_a_graph_may_hold_stay_where_they_are() -> None:
    from core.attention.triton.backend import TritonAttention

    backend: Any = TritonAttention()
    rows = KnownRows(SHAPES["gqa"], num_rows=3, max_len=8, page_size=4, seed=1)
    batch = rows.paged.batch([Part(1, 0, 1)], 0)
    first = backend._counters(batch, 4)
    assert len(first) == 4 * 4 and first.dtype is torch.int32, "each row of the table, padding too, and each head"
    assert backend._counters(batch, 2) is first
    assert backend._counters(rows.paged.batch([Part(0, 0, 1)] * 9, 0), 4) is not first
    assert any(each is first for each in backend._arrived), "kept: a replay writes there"
