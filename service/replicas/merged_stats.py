"""The snapshots of several engines as one: counts add up, and pools of one name are one pool.

A counter of a process must never fall, or rates computed from it jump. So what engines that ended had counted goes on
counting: `counted` leaves only that of a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, Final

from core.types.control import Activity
from core.types.stats import DraftStats, EngineStats, Exemplar, HistogramStats, PoolStats

GAUGES: Final = frozenset(
    {
        "pools",
        "running",
        "waiting",
        "leased_pages",
        "host_cache_bytes",
        "disk_cache_bytes",
        "disk_pending_chunks",
        "adapters_loaded",
        "adapter_bytes",
        "grammars_cached",
        "grammar_cache_bytes",
        "device_idle_ratio",
    }
)
"""What an engine that has ended has no more."""
GREATEST: Final = frozenset({"page_size", "chunked_prefill_size", "last_step_at", "adapters_loaded", "adapter_bytes"})
"""No sums: all engines have the same, or the greatest says most."""
_DEFAULT: Final = EngineStats()


def merged(ready: Sequence[EngineStats], ended: EngineStats = _DEFAULT) -> EngineStats:
    """What the engines of `ready` are together; `ended` has what others counted before they ended."""
    found = [ended, *ready]
    values: dict[str, Any] = {}
    for each in fields(EngineStats):
        made = [getattr(stats, each.name) for stats in found]
        if each.name in GREATEST:
            values[each.name] = max(made)
        elif each.name in _BY_NAME:
            values[each.name] = _BY_NAME[each.name](made)
        elif isinstance(getattr(_DEFAULT, each.name), int | float):
            values[each.name] = sum(made)
    values["device_idle_ratio"] = values["device_idle_ratio"] / len(ready) if ready else 0.0
    return replace(_DEFAULT, **values, activity=_activity(ready), weight_version=_version(ready))


def counted(stats: EngineStats) -> EngineStats:
    """What stays of `stats` once their engine has ended."""
    return replace(stats, **{name: getattr(_DEFAULT, name) for name in GAUGES})


def _activity(ready: Sequence[EngineStats]) -> Activity:
    """What all do; that which keeps most from a client where they differ; REFUSING where there is none."""
    order = list(Activity)
    return max((stats.activity for stats in ready), key=order.index, default=Activity.REFUSING)


def _version(ready: Sequence[EngineStats]) -> str:
    """The version of the weights; those of all engines in order, with commas, while they differ."""
    return ",".join(dict.fromkeys(stats.weight_version for stats in ready))


def _pools(found: Iterable[Sequence[PoolStats]]) -> tuple[PoolStats, ...]:
    pools: dict[str, PoolStats] = {}
    for pool in (pool for each in found for pool in each):
        known = pools.get(pool.name, PoolStats(pool.name, 0, 0))
        total = (known.capacity + pool.capacity, known.used + pool.used, known.cached + pool.cached)
        pools[pool.name] = PoolStats(pool.name, *total)
    return tuple(pools.values())


def _by_label(found: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    totals: dict[str, float] = {}
    for each in found:
        for label, value in each.items():
            totals[label] = totals.get(label, 0) + value
    return totals


def _columns(found: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*found, fillvalue=0)))


def _drafts(found: Iterable[DraftStats | None]) -> DraftStats | None:
    known = [each for each in found if each is not None]
    if not known:
        return None
    return DraftStats(
        steps=sum(each.steps for each in known),
        proposed=_columns(each.proposed for each in known),
        right=_columns(each.right for each in known),
        dropped=sum(each.dropped for each in known),
        most=max(each.most for each in known),
        draft_seconds=sum(each.draft_seconds for each in known),
        verify_seconds=sum(each.verify_seconds for each in known),
    )


def _histograms(found: Iterable[Mapping[str, HistogramStats]]) -> dict[str, HistogramStats]:
    known: dict[str, HistogramStats] = {}
    for each in found:
        for name, more in each.items():
            known[name] = _joined(known[name], more) if name in known else more
    return known


def _joined(one: HistogramStats, more: HistogramStats) -> HistogramStats:
    # Of two examples of a bucket either will do: they carry no time.
    pairs: Iterable[tuple[Exemplar | None, Exemplar | None]] = zip_longest(more.exemplars, one.exemplars)
    examples = tuple(newer or older for newer, older in pairs)
    return HistogramStats(one.bounds, _columns((one.counts, more.counts)), one.total + more.total, examples)


_BY_NAME: Final[Mapping[str, Any]] = {
    "pools": _pools,
    "computed_tokens": _by_label,
    "phase_seconds": _by_label,
    "finished": _by_label,
    "assert_failures": _by_label,
    "drafts": _drafts,
    "histograms": _histograms,
}
