"""What every attention backend must do, checked against attention in float64. Each registered one runs all of it."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.attention.base import AttentionBackend
from core.attention.registry import ATTENTION_BACKENDS, build_attention
from core.errors import ConfigError
from core.memory.kv_e4m3 import FP8_E4M3
from tests.support.fakes.paged_steps import Part
from tests.unit.core.attention.dense import LAYER, KnownRows, Shape

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton kernels run as numpy programs, thousands of times slower (`test_triton.py`): less of everything then."""
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
ROWS, LENGTH, SEEDS = (3, 24, 1) if INTERPRETED else (6, 40, 4)

SHAPES = {
    "gqa": Shape(),
    "mha": Shape(heads=3, kv_heads=3),
    "mqa": Shape(heads=4, kv_heads=1),
    "wide-gqa": Shape(heads=14, kv_heads=2, k_dim=64, v_dim=64),
    "narrow-values": Shape(heads=4, kv_heads=4, k_dim=24, v_dim=16),
    "narrow-values-gqa": Shape(heads=4, kv_heads=2, k_dim=24, v_dim=8),
    "latent": Shape(heads=4, kv_heads=1, k_dim=24, v_dim=16, v_in_k=True),
    "latent-window": Shape(heads=4, kv_heads=1, k_dim=24, v_dim=16, v_in_k=True, window=7),
    "window": Shape(window=7),
    "window-of-one": Shape(window=1),
    "chunk": Shape(chunk=8),
    "window-and-chunk": Shape(window=5, chunk=8),
    "softcap": Shape(softcap=2.0),
    "sinks": Shape(sinks=True),
    "sinks-window": Shape(sinks=True, window=6, heads=8, kv_heads=2),
    "softcap-window-mqa": Shape(softcap=3.0, window=9, kv_heads=1),
    "softcap-sinks-chunk": Shape(softcap=3.0, sinks=True, chunk=5),
    "bf16": Shape(dtype=torch.bfloat16),
    "bf16-window": Shape(dtype=torch.bfloat16, window=7),
    "bf16-sinks": Shape(dtype=torch.bfloat16, sinks=True),
    "bf16-narrow-values": Shape(dtype=torch.bfloat16, heads=4, kv_heads=2, k_dim=24, v_dim=8),
    "bias": Shape(kv_heads=4, bias=True),
    "renamed": Shape(renamed=True),
    "renamed-window": Shape(window=7, renamed=True),
    "codes": Shape(format=FP8_E4M3),
    "codes-bf16-sinks": Shape(format=FP8_E4M3, dtype=torch.bfloat16, sinks=True, k_dim=24),
    "codes-bf16-latent": Shape(4, 1, 24, 16, window=7, v_in_k=True, format=FP8_E4M3, dtype=torch.bfloat16),
}


@pytest.fixture(params=sorted(ATTENTION_BACKENDS))
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    try:
        return build_attention(request.param, torch.device(DEVICE))
    except ConfigError as error:
        pytest.skip(str(error))


def check(rows: KnownRows, backend: AttentionBackend, parts: Sequence[Part], num_extend: int) -> None:
    reason = backend.why_not_stored(rows.shape.format, rows.shape.dtype)
    if reason is not None:
        pytest.skip(reason)
    rows.fill(parts)
    got = rows.attend(backend, parts, num_extend)
    assert got.shape == (sum(p.extend for p in parts), rows.shape.heads, rows.shape.v_dim)
    assert got.dtype == rows.shape.dtype
    assert got.is_contiguous()
    error = (got.double() - rows.expected(parts)).abs().max().item()
    assert error < TOLERANCE[rows.shape.dtype], (error, parts)


def random_parts(seed: int, num_rows: int, max_len: int) -> tuple[list[Part], int]:
    """Ragged parts on distinct rows in any order: fresh prefills, continued chunks (of one token, too), decode rows."""
    draw = random.Random(seed)
    order = draw.sample(range(1, num_rows + 1), num_rows)
    num_extend = draw.randrange(num_rows + 1)
    parts = []
    for place, row in enumerate(order):
        total = draw.randint(1, max_len)
        if place >= num_extend:
            extend = 1
        elif draw.random() < 0.5:
            extend = total
        else:
            extend = draw.randint(1, total)
        parts.append(Part(row, total - extend, extend))
    return parts, num_extend


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_mixed_steps_match_the_formula(backend: AttentionBackend, name: str, page_size: int) -> None:
    for seed in range(SEEDS):
        print(f"seed={seed}")
        rows = KnownRows(SHAPES[name], num_rows=ROWS, max_len=LENGTH, page_size=page_size, seed=seed, device=DEVICE)
        parts, num_extend = random_parts(seed, rows.num_rows, rows.max_len)
        check(rows, backend, parts, num_extend)


@pytest.mark.parametrize("name", ["gqa", "window", "chunk", "sinks", "bf16", "bias"])
def test_many_decode_rows_of_any_length(backend: AttentionBackend, name: str) -> None:
    rows = KnownRows(SHAPES[name], num_rows=37, max_len=70, page_size=4, seed=1, device=DEVICE)
    draw = random.Random(1)
    order = draw.sample(range(1, 38), 37)
    check(rows, backend, [Part(row, draw.randrange(70), 1) for row in order], num_extend=0)


@pytest.mark.parametrize("name", ["gqa", "narrow-values", "window", "chunk", "softcap", "sinks", "bias"])
def test_chunked_prefill_equals_whole_prefill(backend: AttentionBackend, name: str) -> None:
    rows = KnownRows(SHAPES[name], num_rows=2, max_len=48, page_size=4, seed=2, device=DEVICE)
    whole = rows.attend(backend, [Part(1, 0, 48)], num_extend=1)
    cuts = [0, 1, 17, 18, 33, 48]
    chunks = [rows.attend(backend, [Part(1, low, high - low)], num_extend=1) for low, high in pairwise(cuts)]
    assert torch.allclose(whole, torch.cat(chunks), atol=1e-5)


@pytest.mark.parametrize("name", ["gqa", "window", "sinks", "bias"])
def test_neighbours_do_not_matter(backend: AttentionBackend, name: str) -> None:
    rows = KnownRows(SHAPES[name], num_rows=24, max_len=64, page_size=16, seed=3, device=DEVICE)
    parts, num_extend = random_parts(3, rows.num_rows, rows.max_len)
    rows.fill(parts)
    together = rows.attend(backend, parts, num_extend)
    place = 0
    for index, part in enumerate(parts):
        alone = rows.attend(backend, [part], num_extend=int(index < num_extend))
        assert torch.allclose(together[place : place + part.extend], alone, atol=1e-5), part
        place += part.extend


def test_padded_rows_are_finite_and_harmless(backend: AttentionBackend) -> None:
    rows = KnownRows(SHAPES["gqa"], num_rows=4, max_len=32, page_size=4, seed=4, device=DEVICE)
    real = [Part(3, 20, 1), Part(1, 7, 1), Part(4, 31, 1)]
    rows.fill(real)
    padded = rows.attend(backend, [*real, Part(0, 0, 1), Part(0, 0, 1)], num_extend=0)
    assert padded.isfinite().all()
    assert torch.allclose(padded[:3], rows.attend(backend, real, num_extend=0), atol=1e-5)
    touched = rows.paged.pool.k(LAYER)[1 : rows.page_size]
    assert not touched.any(), "padding writes slot 0 and nothing else"


def test_hidden_slots_may_hold_anything(backend: AttentionBackend) -> None:
    """Beyond a row's length the table may name slots of others, and those may hold infinities."""
    rows = KnownRows(SHAPES["gqa"], num_rows=12, max_len=32, page_size=4, seed=5, device=DEVICE)
    rows.paged.pool.k(LAYER)[rows.page_size :] = torch.inf
    rows.paged.pool.v(LAYER)[rows.page_size :] = torch.nan
    check(rows, backend, [Part(row, 2 * row, 1) for row in range(1, 13)], num_extend=0)


def test_writes_every_new_key_and_value(backend: AttentionBackend) -> None:
    rows = KnownRows(SHAPES["narrow-values-gqa"], num_rows=3, max_len=20, page_size=4, seed=6, device=DEVICE)
    parts = [Part(2, 0, 11), Part(1, 5, 6), Part(3, 19, 1)]
    check(rows, backend, parts, num_extend=2)
    for part in parts:
        slots = rows.paged.table[part.row, : part.prefix + part.extend].to(torch.int64)
        assert torch.equal(rows.paged.pool.k(LAYER)[slots], rows.k[part.row, : part.prefix + part.extend])
        assert torch.equal(rows.paged.pool.v(LAYER)[slots], rows.v[part.row, : part.prefix + part.extend])


def test_writes_every_key_but_those_that_are_stored(backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = KnownRows(SHAPES["gqa"], num_rows=3, max_len=20, page_size=4, seed=6, device=DEVICE)
    parts = [Part(2, 0, 9), Part(1, 5, 3), Part(3, 19, 1)]
    rows.fill([Part(part.row, part.prefix + part.extend, 0) for part in parts])
    told: list[str] = []
    recorder: Any = SimpleNamespace(wrote=lambda name, slots: told.append(name))
    rows.paged.pool.recorder = recorder
    monkeypatch.setattr(backend, "forward", partial(backend.forward, stored=True))
    got = rows.attend(backend, parts, num_extend=2)
    assert (got.double() - rows.expected(parts)).abs().max() < TOLERANCE[torch.float32]
    assert not told, "the caller has written them, and told of it"


def test_layers_of_one_step_may_differ_in_span_and_repeat(backend: AttentionBackend) -> None:
    """Gemma mixes windowed and full layers; layers that share KV call twice with the same keys."""
    rows = KnownRows(Shape(), num_rows=4, max_len=40, page_size=4, seed=7, device=DEVICE)
    windowed = KnownRows(Shape(window=6), num_rows=4, max_len=40, page_size=4, seed=7, device=DEVICE)
    parts = [Part(1, 0, 30), Part(2, 12, 8), Part(3, 25, 1), Part(4, 9, 1)]
    rows.fill(parts)
    q, k, v = (
        torch.cat([source[p.row, p.prefix : p.prefix + p.extend] for p in parts]).transpose(0, 1)
        for source in (rows.q, rows.k, rows.v)
    )
    backend.plan(rows.paged.batch(parts, num_extend=2))
    for _ in range(2):
        full = backend.forward(LAYER, q, k, v, scale=rows.scale)
        short = backend.forward(LAYER, q, k, v, scale=rows.scale, sliding_window=6)
        assert (full.double() - rows.expected(parts)).abs().max() < 1e-5
        assert (short.double() - windowed.expected(parts)).abs().max() < 1e-5


def test_a_sibling_has_a_step_of_its_own(backend: AttentionBackend) -> None:
    """Layers of another pool are planned between the plan of these and their call."""
    rows, others = (KnownRows(Shape(), num_rows=3, max_len=24, page_size=4, seed=s, device=DEVICE) for s in (9, 10))
    parts, other = [Part(1, 0, 6), Part(2, 12, 1)], [Part(3, 9, 6), Part(1, 20, 1)]
    rows.fill(parts)
    backend.plan(rows.paged.batch(parts, num_extend=1))
    check(others, backend.sibling(), other, num_extend=1)
    q, k, v = (
        torch.cat([source[p.row, p.prefix : p.prefix + p.extend] for p in parts]).transpose(0, 1)
        for source in (rows.q, rows.k, rows.v)
    )
    got = backend.forward(LAYER, q, k, v, scale=rows.scale)
    assert (got.double() - rows.expected(parts)).abs().max() < 1e-5


def test_works_in_and_out_of_inference_mode(backend: AttentionBackend) -> None:
    rows = KnownRows(Shape(), num_rows=3, max_len=40, page_size=4, seed=8, device=DEVICE)
    with torch.inference_mode():
        check(rows, backend, [Part(1, 20, 1), Part(2, 3, 1)], num_extend=0)
    # Once with memory left over from inference mode, once with more than was needed there.
    check(rows, backend, [Part(1, 4, 1), Part(2, 3, 1)], num_extend=0)
    check(rows, backend, [Part(1, 20, 1), Part(2, 3, 1), Part(3, 39, 1)], num_extend=0)
    with torch.inference_mode():
        check(rows, backend, [Part(1, 21, 1), Part(2, 4, 1)], num_extend=0)
