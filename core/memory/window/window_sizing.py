"""How memory is divided between the ordinary pool and the window pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.config import MemoryConfig
from core.errors import ConfigError
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.sizing import check_configured, free_bytes, num_pages
from core.memory.window.window_bounds import WindowBounds


@dataclass(frozen=True, slots=True)
class SplitLayers:
    """The layers of a model by pool: `windowed` ones see at most `window` keys, the others all."""

    full: tuple[KVLayerSpec, ...]
    windowed: tuple[KVLayerSpec, ...]

    @classmethod
    def of(cls, layers: Sequence[KVLayerSpec], context_length: int, *, windows: bool) -> SplitLayers:
        """Split `layers`. Windowed are those with a window shorter than the context; none unless `windows` is set."""
        limit = context_length if windows else 0
        windowed = tuple(spec for spec in layers if spec.window is not None and spec.window < limit)
        return cls(tuple(spec for spec in layers if spec not in windowed), windowed)

    def bounds(self, page_size: int, chunk: int, doubt: int = 0) -> WindowBounds | None:
        """Most window pages that rows can need, by the longest window; None where no layer is windowed."""
        longest = max((spec.window or 0 for spec in self.windowed), default=0)
        return WindowBounds(longest, page_size, chunk, doubt) if longest else None


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of the ordinary and of the window pool; 0 where there is no window pool."""

    kv: int
    window: int


def divide_pages(
    config: MemoryConfig,
    layers: SplitLayers,
    bounds: WindowBounds | None,
    dtype: torch.dtype,
    context_length: int,
    device: torch.device,
    reserved_bytes: int = 0,
    bytes_beside: int = 0,
    format: KVFormat = PLAIN,
) -> PageCounts:
    """Pages as configured, else from the memory at hand; never more than all rows could fill or have in their windows.

    Where memory decides, the window pool gets half as many pages as the ordinary one, unless every row's window fits
    into fewer. Requests shorter than twice the window then run out of window pages first, longer ones of KV pages.
    `reserved_bytes` are left free. `bytes_beside`: bytes that pools of another kind take per token of the ordinary one.
    `format`: how both pools store keys and values of `dtype`.

    Raises ConfigError when the ordinary pool has no page, or the window pool too few for one window and one chunk.
    """
    if bounds is None:
        per_token = KVPool.bytes_per_token_for(layers.full, dtype, format) + bytes_beside
        return PageCounts(num_pages(config, per_token, context_length, device, reserved_bytes), 0)
    page = bounds.page_size
    enough = _enough(config, bounds)
    most = config.max_running_requests * context_length // page
    kv_bytes, window_bytes = (
        page * KVPool.bytes_per_token_for(each, dtype, format) for each in (layers.full, layers.windowed)
    )
    kv_bytes += page * bytes_beside
    if config.max_total_tokens is not None:
        kv = config.max_total_tokens // page
        counts = _checked(kv, min(kv, enough), bounds)
        check_configured(config, counts.kv * kv_bytes + counts.window * window_bytes + reserved_bytes, device)
        return counts
    budget = max(0, free_bytes(device, config.machine_share) - reserved_bytes)
    if config.max_window_tokens is not None:
        left = max(0, budget - enough * window_bytes)
        kv = min(most, left // kv_bytes) if kv_bytes else most
        return _checked(kv, min(kv, enough), bounds)
    if not kv_bytes:
        # Without full layers KV pages are only numbers: as many as there can be tokens, but where memory holds less
        # than one window no more than that, so that short requests are served.
        window = min(enough, most, budget // window_bytes)
        return _checked(most if window >= bounds.alone else window, window, bounds)

    def window_for(kv: int) -> int:
        return min(kv, enough, max(kv // 2, bounds.alone))

    # The largest number of KV pages for which both pools fit into the budget.
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = middle * kv_bytes + window_for(middle) * window_bytes <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return _checked(low, window_for(low), bounds)


def _enough(config: MemoryConfig, bounds: WindowBounds) -> int:
    """Window pages that suffice: as configured, else for every row's window, twice where a prefix cache keeps some."""
    if config.max_window_tokens is not None:
        return config.max_window_tokens // bounds.page_size
    kept = 1 if config.prefix_cache == "none" else 2
    return config.max_running_requests * bounds.per_row * kept + bounds.per_step


def _checked(kv: int, window: int, bounds: WindowBounds) -> PageCounts:
    if kv < 1:
        raise ConfigError("max_total_tokens: the memory at hand holds less than one page")
    if window < min(kv, bounds.alone):
        needed = bounds.alone * bounds.page_size
        drafts = f", with {bounds.doubt} drafts in flight" if bounds.doubt else ""
        raise ConfigError(
            f"max_window_tokens: {window * bounds.page_size} tokens cannot hold a window of {bounds.window} and a "
            f"chunk of {bounds.chunk}{drafts}; at least {needed} can"
        )
    return PageCounts(kv, window)
