"""Renders the engine's newest snapshot as Prometheus families, at scrape time and on the scraper's thread.

One immutable `EngineStats` per scrape, so all figures of a scrape belong to the same step and nothing is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from core.engine.door import EngineState
from core.types.io import FinishReason
from core.types.stats import EngineStats, HistogramStats
from service.engine_slot import EngineSlot
from service.metrics import names
from service.metrics.names import Metric

KV_POOL_PREFIX = "kv"
"""Pools whose name begins so hold keys and values; other pools are request rows and recurrent states."""

_ALWAYS_FINISHED = tuple(reason.value for reason in FinishReason)


@dataclass(frozen=True, slots=True)
class ServerView:
    """What the collector shows of one moment: the snapshot, the state, and the labels of `slipstream_build_info`."""

    stats: EngineStats
    state: EngineState
    version: str
    model: str = ""
    dtype: str = ""


def engine_view(slot: EngineSlot, version: str) -> ServerView:
    """The moment that `slot` shows."""
    if slot.engine is None:
        return ServerView(slot.stats, slot.state, version)
    info = slot.engine.model_info
    return ServerView(slot.stats, slot.state, version, info.name, info.dtype)


def kv_usage(stats: EngineStats) -> float:
    """Share of the KV pools that live requests hold, 0 to 1; 0 before there are pools."""
    pools = [pool for pool in stats.pools if pool.name.startswith(KV_POOL_PREFIX)]
    capacity = sum(pool.capacity for pool in pools)
    return sum(pool.used for pool in pools) / capacity if capacity else 0.0


class EngineCollector(Collector):
    """A collector over `view()`, which may be called from any thread."""

    def __init__(self, view: Callable[[], ServerView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Family]:
        """All families of one snapshot."""
        view = self._view()
        yield from _pools(view.stats)
        yield from (_single(metric, getattr(view.stats, metric.field)) for metric in names.SNAPSHOT)
        yield _single(names.KV_CACHE_USAGE, kv_usage(view.stats))
        yield from _histograms(view.stats)
        yield _labelled(names.ASSERT_FAILURES, view.stats.assert_failures)
        yield _labelled(names.REQUESTS_FINISHED, dict.fromkeys(_ALWAYS_FINISHED, 0) | view.stats.finished)
        yield _single(names.READY, float(view.state is EngineState.READY))
        yield _single(names.DRAINING, float(view.state is EngineState.DRAINING))
        build = _family(names.BUILD_INFO)
        build.add_metric([view.version, view.model, view.dtype], 1)
        yield build


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return make(metric.name, metric.help, labels=metric.labels)


def _single(metric: Metric, value: float) -> Family:
    family = _family(metric)
    family.add_metric([], value)
    return family


def _labelled(metric: Metric, values: dict[str, int]) -> Family:
    family = _family(metric)
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family


def _pools(stats: EngineStats) -> Iterator[Family]:
    for metric, attribute in (
        (names.POOL_CAPACITY, "capacity"),
        (names.POOL_USED, "used"),
        (names.POOL_CACHED, "cached"),
    ):
        yield _labelled(metric, {pool.name: getattr(pool, attribute) for pool in stats.pools})


def _histograms(stats: EngineStats) -> Iterator[Family]:
    for key, metric in names.HISTOGRAMS.items():
        family = HistogramMetricFamily(metric.name, metric.help)
        recorded = stats.histograms.get(key)
        if recorded is not None:
            family.add_metric([], buckets=_buckets(recorded), sum_value=recorded.total)
        yield family


def _buckets(recorded: HistogramStats) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound in Prometheus spelling; the last bound is always +Inf."""
    bounds = [f"{bound:g}" for bound in recorded.bounds[:-1]] + ["+Inf"]
    return list(zip(bounds, map(float, recorded.counts), strict=True))
