"""Windowed layers over a pool of their own give what they give over the ordinary one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.attention.registry import build_attention
from core.memory.kv_pool import KVPool
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pool import SlidingWindowPool
from tests.support.fakes.paged_steps import PagedRows
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel, load
from tests.unit.core.models.test_transformers_backend import sequences, worst_error

PAGE = 4


class WindowedRun(PackedRun):
    """The windowed layers in pages of another pool, in another order."""

    def rebind(self) -> None:
        """See `PackedRun`."""
        spec = self.model.spec
        windowed = [layer for layer in spec.kv_layers if layer.window is not None]
        full = [layer for layer in spec.kv_layers if layer.window is None]
        assert windowed and full
        self.paged = PagedRows(full, len(self.sequences) - 1, 64, page_size=PAGE, seed=1)
        pages = self.paged.pool.num_pages
        pool = KVPool(windowed, pages, PAGE, spec.dtype, CPU, WINDOW)
        for layer in windowed:
            pool.k(layer.layer_id)[PAGE:] = pool.v(layer.layer_id)[PAGE:] = 50.0
        windows = SlidingWindowPool(pool, pages)
        windows.table[1:] = torch.randperm(pages, generator=torch.Generator().manual_seed(2)) + 1
        self.model.bind(self.paged.pool, build_attention("auto", CPU), {WINDOW: windows})


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_two_pools_equal_plain_forward(checkpoint: Callable[[str], Path], kind: str) -> None:
    path, rows = checkpoint(kind), sequences()
    plain = PlainModel(path)
    run = WindowedRun(load(path), rows)
    worst, same = worst_error(run, {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 1e-4 and same
