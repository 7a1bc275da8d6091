"""Immutable snapshots of the engine, swapped by reference once a step and read by any thread.

One uniform `PoolStats` per pool instead of one optional field per kind of pool; the same object feeds metrics, health,
`GetLoad`, tests and benchmarks (trio's `statistics()` habit).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from core.types.control import Activity


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


LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Upper bounds of the buckets for tokens that a row gets of one step."""


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What became of drafts so far. `proposed[n]`: how often a row had n drafts in a step; `right[n]`: how often n of
    them were right. Both leave out rows that had none.
    """

    steps: int = 0
    """Steps that verified drafts."""
    proposed: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    dropped: int = 0
    """Tokens of these steps that stood behind the end of their request."""
    most: int = 0
    """The most drafts of a row in the last step; 0 if it verified none."""
    draft_seconds: float = 0.0
    """Seconds of the forward stream in which drafts were made, behind the sampling of steps."""
    verify_seconds: float = 0.0
    """Seconds of the steps that verified drafts, without those in which they made new ones."""

    @property
    def rows(self) -> int:
        """How often a row had drafts in a step."""
        return sum(self.proposed)

    @property
    def tokens(self) -> int:
        """Drafts that steps verified."""
        return sum(self.proposed_by_position)

    @property
    def accepted(self) -> int:
        """Of these, those that were the token which the model sampled."""
        return sum(self.accepted_by_position)

    @property
    def proposed_by_position(self) -> tuple[int, ...]:
        """Drafts that were verified, by how many stood before them in their row."""
        return _at_least(self.proposed)

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Drafts that were right, by how many stood before them; as long as `proposed_by_position`."""
        found = _at_least(self.right)
        return found + (0,) * (len(self.proposed) - len(self.right))

    @property
    def lengths(self) -> HistogramStats:
        """Tokens that a row with drafts got of a step, the one behind the right drafts included."""
        counts = (*(sum(self.right[:length]) for length in LENGTHS), self.rows)
        return HistogramStats((*LENGTHS, float("inf")), counts, float(self.accepted + self.rows))

    @property
    def acceptance_rate(self) -> float:
        """The part of drafts that was right; 0 before there were any."""
        return self.accepted / self.tokens if self.tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens that a row with drafts got of a step, on average; 0 before there were any."""
        return 1 + self.accepted / self.rows if self.rows else 0.0


def _at_least(counts: tuple[int, ...]) -> tuple[int, ...]:
    """At i: the sum of `counts` behind i."""
    return tuple(accumulate(counts[:0:-1]))[::-1]


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What became of keys that travel between engines, so far. An engine that prefills has the first four."""

    kept: int = 0
    """Prompts whose keys wait for an engine that decodes, now."""
    given: int = 0
    lost: int = 0
    """Prompts whose keys no engine got: there was no room for them, or none asked in time."""
    given_tokens: int = 0
    taken: int = 0
    """Requests that went on from keys of another engine."""
    taken_tokens: int = 0
    evicted: int = 0
    """Requests whose cached beginning was given up while the rest of their keys was on its way."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Keys that did not arrive, by reason."""


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One engine of several behind one server, as the process knows it that shares requests out."""

    name: str
    ready: bool
    """Whether it is sent requests."""
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    """Pages that live requests hold."""
    kv_capacity: int = 0
    requests: int = 0
    """Sent to it so far."""
    matched: int = 0
    """Of these, those whose prompt begins like one that it was sent before."""
    restarts: int = 0


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
    leased_pages: int = 0
    """KV pages without an owner that a transfer in flight still touches; free when it is over."""
    host_cache_bytes: int = 0
    """Host memory that copies of prefixes and of retracted requests take."""
    transfers: TransferStats | None = None
    """None for an engine that does both, prefill and decode."""
    rejoined_requests: int = 0
    """How often a retracted request went on from its copy."""
    host_copies_dropped: int = 0
    """How often there was no room for a copy, so that the request was computed again."""
    host_fetched_tokens: int = 0
    """Tokens of prefixes that came back from host memory and were not computed again."""
    host_kept_tokens: int = 0
    """Tokens of prefixes that were copied to host memory."""
    host_evicted_tokens: int = 0
    """Tokens of prefixes whose copies gave way to others."""
    disk_cache_bytes: int = 0
    """Bytes of the files that keep prefixes."""
    disk_fetched_tokens: int = 0
    """Tokens of prefixes that were read from files."""
    disk_kept_tokens: int = 0
    """Tokens of prefixes that were written to files."""
    disk_evicted_tokens: int = 0
    """Tokens of prefixes whose files gave way to others."""
    disk_skipped_tokens: int = 0
    """Tokens of prefixes that were not written, since the disk was behind."""
    disk_pending_chunks: int = 0
    """Pieces of prefixes that wait to be written."""
    disk_failures: int = 0
    """Pieces of prefixes that could not be written, or were not whole when they were read."""
    page_size: int = 1
    chunked_prefill_size: int = 0
    """Most prompt tokens in one step."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that went through the model, by `prefill` and `decode`; tokens found in the prefix cache do not count."""
    preemptions: int = 0
    priority_preemptions: int = 0
    """Of `preemptions`, those in favour of a request of a higher class."""
    share_preemptions: int = 0
    """Of `preemptions`, those in favour of a tenant that held less."""
    restart_preemptions: int = 0
    """Of `preemptions`, those before new weights or sleep. The remaining ones were for lack of pages."""
    recomputed_tokens: int = 0
    """Known tokens that preempted requests had to compute again: the cost of preemption."""
    stale_results: int = 0
    split_steps: int = 0
    """Steps whose rows were sampled a few at a time, for lack of memory."""
    drafts: DraftStats | None = None
    """None without speculation."""
    text_failures: int = 0
    """Requests on which the tokenizer failed. A request whose output was complete by then is in `finished` as complete.
    """
    chats: int = 0
    """Conversations that became prompts."""
    chat_refusals: int = 0
    """Conversations that the template refused or failed on, in time, size or otherwise."""
    images: int = 0
    image_tokens: int = 0
    """Of images in prompts: how many, and tokens that stand for them."""
    sounds: int = 0
    """Sounds that became prompts of an encoder."""
    adapters_loaded: int = 0
    adapter_bytes: int = 0
    adapter_evictions: int = 0
    adapter_load_failures: int = 0
    activity: Activity = Activity.SERVING
    weight_version: str = ""
    """Name of the weights that the next step is computed with."""
    weight_updates: int = 0
    weight_update_failures: int = 0
    """Updates that ended with an error; the old weights went on serving."""
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
    replicas: tuple[ReplicaStats, ...] = ()
    """Empty for an engine that is the only one of its server."""
