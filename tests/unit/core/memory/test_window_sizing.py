"""Memory divided between the ordinary pool and the window pool: all of it used, nothing promised that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.config import MemoryConfig
from core.errors import ConfigError
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.sizing import num_pages
from core.memory.window import window_sizing
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_sizing import PageCounts, SplitLayers, divide_pages

CPU = torch.device("cpu")
CONTEXT, PAGE, WINDOW = 4096, 16, 64
GEMMA = tuple(KVLayerSpec(i, 1, 8, 8, window=None if i % 6 == 5 else WINDOW) for i in range(12))
MISTRAL = tuple(KVLayerSpec(i, 1, 8, 8, window=WINDOW) for i in range(4))
LLAMA = tuple(KVLayerSpec(i, 1, 8, 8) for i in range(4))
BOUNDS = WindowBounds(WINDOW, PAGE, 128)


def layer_bytes(pages: int, layers: tuple[KVLayerSpec, ...]) -> int:
    return pages * PAGE * KVPool.bytes_per_token_for(layers, torch.float32)


def divide(layers: tuple[KVLayerSpec, ...], budget: int, monkeypatch: pytest.MonkeyPatch, **config: Any) -> PageCounts:
    for module in ("core.memory.window.window_sizing.free_bytes", "core.memory.sizing.free_bytes"):
        monkeypatch.setattr(module, lambda *_: budget)
    split = SplitLayers.of(layers, CONTEXT, windows=True)
    bounds = split.bounds(PAGE, 128)
    settings = MemoryConfig(page_size=PAGE, **{"max_running_requests": 8, **config})
    return divide_pages(settings, split, bounds, torch.float32, CONTEXT, CPU)


def test_layers_go_where_their_window_says() -> None:
    split = SplitLayers.of(GEMMA, CONTEXT, windows=True)
    assert [spec.layer_id for spec in split.full] == [5, 11] and len(split.windowed) == 10
    assert SplitLayers.of(GEMMA, WINDOW, windows=True).windowed == (), "a window as long as the context hides nothing"
    assert SplitLayers.of(GEMMA, CONTEXT, windows=False) == SplitLayers(GEMMA, ())
    assert SplitLayers(GEMMA, ()).bounds(PAGE, 128) is None
    assert SplitLayers.of((*GEMMA, KVLayerSpec(12, 1, 8, 8, window=99)), CONTEXT, windows=True).bounds(
        PAGE, 128
    ) == WindowBounds(99, PAGE, 128)


@pytest.mark.parametrize("pages", [3, 50, 300, 700, 2000])
@pytest.mark.parametrize("rows", [1, 8, 200])
def test_memory_is_used_up_and_not_passed(pages: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = layer_bytes(pages, GEMMA)
    found = divide(GEMMA, budget, monkeypatch, max_running_requests=rows)
    split = SplitLayers.of(GEMMA, CONTEXT, windows=True)
    taken = layer_bytes(found.kv, split.full) + layer_bytes(found.window, split.windowed)
    more = layer_bytes(found.kv + 1, split.full) + layer_bytes(found.window + 1, split.windowed)
    assert taken <= budget
    assert more > budget or found.kv == rows * CONTEXT // PAGE, "memory is left that requests could use"
    assert min(pages, rows * CONTEXT // PAGE) <= found.kv, (
        "never fewer KV pages than one pool for all layers would have"
    )
    assert found.window >= min(found.kv, BOUNDS.alone), "one request always fits"
    assert found.window >= 0.8 * pages or found.window == rows * BOUNDS.per_row * 2 + BOUNDS.per_step


def test_layers_with_windows_only_leave_pages_without_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = divide(MISTRAL, layer_bytes(40, MISTRAL), monkeypatch)
    assert found == PageCounts(kv=8 * CONTEXT // PAGE, window=40)
    found = divide(MISTRAL, layer_bytes(10**6, MISTRAL), monkeypatch, prefix_cache="none")
    assert found.window == 8 * BOUNDS.per_row + BOUNDS.per_step, "more than all rows can need is not taken"
    few = BOUNDS.alone - 1
    assert divide(MISTRAL, layer_bytes(few, MISTRAL), monkeypatch) == PageCounts(few, few), (
        "no window, but short requests"
    )


def test_what_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert divide(GEMMA, 0, monkeypatch, max_total_tokens=320) == PageCounts(20, 20)
    assert divide(GEMMA, 0, monkeypatch, max_total_tokens=32000, max_window_tokens=800) == PageCounts(2000, 50)
    found = divide(GEMMA, layer_bytes(300, GEMMA), monkeypatch, max_window_tokens=800)
    split = SplitLayers.of(GEMMA, CONTEXT, windows=True)
    assert found.window == 50 and found.kv > 1000
    assert layer_bytes(found.kv, split.full) + layer_bytes(50, split.windowed) <= layer_bytes(300, GEMMA)


def test_a_pool_that_no_long_request_fits_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = BOUNDS.alone * PAGE
    with pytest.raises(ConfigError, match=rf"max_window_tokens.*at least {needed}"):
        divide(GEMMA, 0, monkeypatch, max_total_tokens=32000, max_window_tokens=needed - 1)
    assert divide(GEMMA, 0, monkeypatch, max_total_tokens=32000, max_window_tokens=needed).window == BOUNDS.alone
    with pytest.raises(ConfigError, match="less than one page"):
        divide(GEMMA, 100, monkeypatch)


def test_without_windows_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = layer_bytes(123, LLAMA)
    found = divide(LLAMA, budget, monkeypatch)
    config = MemoryConfig(page_size=PAGE, max_running_requests=8)
    assert found == PageCounts(num_pages(config, KVPool.bytes_per_token_for(LLAMA, torch.float32), CONTEXT, CPU), 0)
    assert found.kv == 123 and window_sizing.num_pages is num_pages
