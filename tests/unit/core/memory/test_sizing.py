"""Pools take what others leave of the memory at hand, and no more than all rows could fill."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.config import MemoryConfig
from core.errors import ConfigError
from core.memory import sizing
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.sizing import CPU_LIMIT, free_bytes, num_pages
from core.memory.window import window_sizing
from core.memory.window.window_sizing import SplitLayers, divide_pages

CPU = torch.device("cpu")
PAGE, CONTEXT, ROWS = 16, 4096, 8
EACH = 12 * (8 + 8) * 4
"""Bytes of a token in all layers."""
CONFIG = MemoryConfig(page_size=PAGE, max_running_requests=ROWS)
LAYERS = tuple(KVLayerSpec(i, 1, 8, 8, window=None if i % 6 == 5 else 64) for i in range(12))


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of 300 pages of the plain pool."""
    found = 300 * PAGE * EACH
    for module in (sizing, window_sizing):
        monkeypatch.setattr(module, "free_bytes", lambda _, share: int(found * share))
    return found


def test_memory_that_other_pools_were_promised_is_left_to_them(budget: int) -> None:
    assert num_pages(CONFIG, EACH, CONTEXT, CPU) == 300
    assert num_pages(CONFIG, EACH, CONTEXT, CPU, 100 * PAGE * EACH) == 200
    with pytest.raises(ConfigError, match="less than one page"):
        num_pages(CONFIG, EACH, CONTEXT, CPU, budget + 1)


def test_an_engine_beside_others_takes_its_share() -> None:
    half = replace(CONFIG, machine_share=0.5)
    assert num_pages(half, EACH, CONTEXT, CPU) == 150
    split = SplitLayers.of(LAYERS, CONTEXT, windows=True)
    whole, less = (
        divide_pages(config, split, split.bounds(PAGE, 128), torch.float32, CONTEXT, CPU) for config in (CONFIG, half)
    )
    assert 0 < less.kv <= whole.kv // 2 + 1 and 0 < less.window <= whole.window


def test_no_more_pages_than_rows_can_fill() -> None:
    assert num_pages(CONFIG, EACH, 100, CPU) == ROWS * 100 // PAGE
    assert num_pages(CONFIG, 0, 100, CPU) == ROWS * 100 // PAGE, "pages without bytes"


@pytest.mark.parametrize("asked", [None, 800])
def test_a_divided_pool_leaves_it_too(budget: int, asked: int | None) -> None:
    split = SplitLayers.of(LAYERS, CONTEXT, windows=True)
    bounds = split.bounds(PAGE, 128)
    config = MemoryConfig(page_size=PAGE, max_running_requests=ROWS, max_window_tokens=asked)
    full, windowed = (PAGE * KVPool.bytes_per_token_for(each, torch.float32) for each in (split.full, split.windowed))
    for reserved in (0, budget // 4):
        found = divide_pages(config, split, bounds, torch.float32, CONTEXT, CPU, reserved)
        taken = found.kv * full + found.window * windowed
        assert budget - reserved - 2 * (full + windowed) < taken <= budget - reserved


def test_a_cpu_lends_a_quarter_of_its_memory_and_a_device_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for free, lent in ((1 << 30, 1 << 28), (1 << 40, CPU_LIMIT)):
        monkeypatch.setattr(sizing, "free_memory", lambda free=free: free)
        assert free_bytes(CPU) == lent
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert free_bytes(torch.device("cuda")) == 850


@pytest.mark.parametrize("windows", [False, True])
def test_more_than_the_machine_has_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, windows: bool) -> None:
    """A CPU would be out of memory only once tokens fill the pools."""
    layers, tokens = SplitLayers.of(LAYERS, CONTEXT, windows=windows), 1600
    asked = replace(CONFIG, max_total_tokens=tokens)
    bounds = layers.bounds(PAGE, 64)
    pages = divide_pages(asked, layers, bounds, torch.float32, CONTEXT, CPU, 1000)
    each, window = (KVPool.bytes_per_token_for(part, torch.float32) * PAGE for part in (layers.full, layers.windowed))
    needed = pages.kv * each + pages.window * window + 1000
    monkeypatch.setattr(sizing, "available_memory", lambda: needed)
    assert divide_pages(asked, layers, bounds, torch.float32, CONTEXT, CPU, 1000) == pages
    monkeypatch.setattr(sizing, "available_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match=f"^max_total_tokens: {tokens} tokens take {needed} bytes, {needed - 1} of"):
        divide_pages(asked, layers, bounds, torch.float32, CONTEXT, CPU, 1000)
    assert divide_pages(CONFIG, layers, bounds, torch.float32, CONTEXT, CPU, 1000).kv, "sized by what is there"
    assert divide_pages(asked, layers, bounds, torch.float32, CONTEXT, torch.device("cuda"), 1000) == pages
