"""Immutable snapshots of the engine, swapped by reference once a step and read by any thread.

One uniform `PoolStats` per pool instead of one optional field per kind of pool; the same object feeds metrics, health,
`GetLoad`, tests and benchmarks (trio's `statistics()` habit).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Occupancy of one pool in its own unit (rows or pages). `used + cached + free == capacity`, without padding."""

    name: str
    capacity: int
    used: int
    cached: int = 0

    @property
    def free(self) -> int:
        """What could be handed out without evicting anything."""
        return self.capacity - self.used - self.cached


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """A cumulative histogram: `counts[i]` observations fell at or below `bounds[i]`, the last bound is +Inf."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine as of the end of one step. Counters only grow; times are seconds.

    `finished` counts ended requests by reason (`stop`, `length`, `cancelled`, or an error's reason in lower case);
    `assert_failures` has every check name from the start, host and device alike.
    """

    step: int = 0
    pools: tuple[PoolStats, ...] = ()
    running: int = 0
    waiting: int = 0
    page_size: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Known tokens that preempted requests had to compute again: what preemption costs."""
    stale_results: int = 0
    adapters_loaded: int = 0
    adapter_bytes: int = 0
    adapter_evictions: int = 0
    adapter_load_failures: int = 0
    device_idle_ratio: float = 0.0
    last_step_at: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    assert_failures: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, HistogramStats] = field(default_factory=dict)
