"""Windowed layers with a KV pool of their own: the step, translated into that pool."""

from __future__ import annotations

import dataclasses

import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.memory.companion import DeviceCompanion
from core.memory.window.window_pool import SlidingWindowPool


class WindowedLayers:
    """`layers` attend through `attention`, over `pool`; the other layers use the ordinary pool.

    Their backend gets the step as a batch over the window pool, so backends need not know that there are two pools.
    Slots are translated once per step and span, and only those that the span makes visible.
    """

    def __init__(self, pool: SlidingWindowPool, attention: AttentionBackend) -> None:
        self.pool = pool
        self.attention = attention
        self.layers = frozenset(spec.layer_id for spec in pool.kv.layers)
        self.slots = torch.empty(0, dtype=torch.int64)
        """int64[T]: where the step's keys and values of these layers go, in their pool."""
        self.view: ForwardBatch | None = None
        """The step as a batch over that pool."""

    def plan(self, batch: ForwardBatch) -> None:
        """Start a step; `batch` is over the ordinary pool."""
        view = dataclasses.replace(batch, kv_pool=self.pool.kv, page_map=self.pool.table)
        view.out_cache_loc = self.slots = view.pool_slots(batch.out_cache_loc)
        self.view = view
        self.attention.plan(view)


def window_layers(pool: DeviceCompanion | None, attention: AttentionBackend) -> WindowedLayers | None:
    """The layers of `pool`, attending through a sibling of `attention`; None for a model bound without such a pool."""
    if pool is None:
        return None
    assert isinstance(pool, SlidingWindowPool), type(pool)
    return WindowedLayers(pool, attention.sibling())
