"""The engine's load in the numbers that gateways route by."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from core.types.stats import EngineStats
from service.gateway.dialect import Load
from service.limits.usage import TenantLoad
from service.metrics.collector import kv_usage

KV_POOL = "kv_page"
WINDOW_SECONDS = 5.0
SAMPLE_SECONDS = 0.5


class LoadMeter:
    """Reads snapshots of `stats()`. All callers use one meter, so its rate is over time and not between two callers."""

    def __init__(
        self, stats: Callable[[], EngineStats], max_running: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stats = stats
        self._max_running = max_running
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def load(self) -> Load:
        """The load of all tenants, as of the engine's last step."""
        stats = self._stats()
        pages = next((pool for pool in stats.pools if pool.name == KV_POOL), None)
        return Load(
            running=stats.running,
            waiting=stats.waiting,
            used_tokens=0 if pages is None else pages.used * stats.page_size,
            max_total_tokens=0 if pages is None else pages.capacity * stats.page_size,
            token_usage=kv_usage(stats),
            gen_throughput=self._rate(stats.generation_tokens),
            cache_hit_rate=stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
            max_running=self._max_running,
            drafts=stats.drafts,
        )

    def own(self, load: TenantLoad) -> Load:
        """The load of one tenant: its requests and their tokens, and no figure that other tenants have a part in."""
        room = self.load().max_total_tokens
        return Load(
            running=load.running,
            waiting=load.waiting,
            used_tokens=load.tokens,
            max_total_tokens=room,
            token_usage=min(1.0, load.tokens / room) if room else 0.0,
            gen_throughput=0.0,
            cache_hit_rate=0.0,
            max_running=self._max_running,
        )

    def _rate(self, tokens: int) -> float:
        """Tokens per second since the oldest sample of the window; 0 until there is one."""
        now, samples = self._clock(), self._samples
        if not samples or now - samples[-1][0] >= SAMPLE_SECONDS:
            samples.append((now, tokens))
        # One sample older than the window stays, so that a rare caller gets the rate since its last call.
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_SECONDS:
            samples.popleft()
        since, before = samples[0]
        return (tokens - before) / (now - since) if now > since else 0.0
