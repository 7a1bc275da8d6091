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
        """Rows or pages that could be handed out without evicting anything."""
        return self.capacity - self.used - self.cached


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation of a traced request: an example of what its bucket counts."""

    trace_id: str
    value: float


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """A cumulative histogram: `counts[i]` observations fell at or below `bounds[i]`, the last bound is +Inf.

    `exemplars[i]` is the last traced observation in that bucket alone; the tuple is empty if there was none at all.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    exemplars: tuple[Exemplar | None, ...] = ()


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
    computed_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that went through the model, by `prefill` and `decode`; tokens found in the prefix cache do not count."""
    preemptions: int = 0
    priority_preemptions: int = 0
    """Of `preemptions`, those in favour of a request of a higher class."""
    share_preemptions: int = 0
    """Of `preemptions`, those in favour of a tenant that held less. The remaining ones were for lack of pages."""
    recomputed_tokens: int = 0
    """Known tokens that preempted requests had to compute again: the cost of preemption."""
    stale_results: int = 0
    split_steps: int = 0
    """Steps whose rows were sampled a few at a time, for lack of memory."""
    draft_tokens: int = 0
    """Drafts that steps verified."""
    accepted_draft_tokens: int = 0
    """Of these, those that were the token which the model sampled."""
    text_failures: int = 0
    """Requests on which the tokenizer failed. A request whose output was complete by then is in `finished` as complete.
    """
    adapters_loaded: int = 0
    adapter_bytes: int = 0
    adapter_evictions: int = 0
    adapter_load_failures: int = 0
    grammars_cached: int = 0
    grammar_cache_bytes: int = 0
    grammar_cache_hits: int = 0
    grammar_cache_evictions: int = 0
    grammar_compile_failures: int = 0
    device_idle_ratio: float = 0.0
    """Over about the last 50 steps; compute it from the two sums below for any other period."""
    device_busy_seconds: float = 0.0
    device_idle_seconds: float = 0.0
    """Seconds in which the device waited for the host although there were requests."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the scheduler's thread, by phase of `core.lanes.PHASES`."""
    last_step_at: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    assert_failures: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, HistogramStats] = field(default_factory=dict)
