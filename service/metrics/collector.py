"""Renders the engine's newest snapshot as Prometheus families, at scrape time and on the scraper's thread.

One immutable `EngineStats` per scrape, so all figures of a scrape belong to the same step and nothing is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from core.engine.api import EngineState
from core.lanes import PHASES
from core.machine import memory_share
from core.types.control import Activity
from core.types.io import FinishReason
from core.types.stats import DraftStats, EngineStats, HistogramStats, TransferStats
from service.config.server_config import ServerConfig
from service.config.sources import values_of
from service.engine.handle import EngineHandle
from service.metrics import control, names, replicas, speculation, transfers
from service.metrics.histograms import HISTOGRAMS
from service.metrics.metric import Metric

KV_POOL = "kv_page"
DRAIN_MARGIN_SECONDS = 10.0
"""Most seconds that ending the streams which a drain cut, and closing, may take."""

Bucket = tuple[str, float] | tuple[str, float, Exemplar]

NOT_MEMORY = frozenset({"req"})
"""Pools without memory of their own. Every other pool holds up admission when it is full."""

_ALWAYS_FINISHED = tuple(reason.value for reason in FinishReason)


@dataclass(frozen=True, slots=True)
class ServerView:
    """The figures that the collector shows of one moment. `singles`: values by metric. `infos`: labels by metric."""

    stats: EngineStats
    state: EngineState
    singles: tuple[tuple[Metric, float], ...] = ()
    infos: tuple[tuple[Metric, tuple[str, ...]], ...] = ()


def engine_view(handle: EngineHandle, config: ServerConfig, version: str, frontends: int = 0) -> ServerView:
    """The figures of the engine of `handle` now; `frontends` is the number of connected front ends."""
    stats = handle.stats
    info = None if handle.engine is None else handle.engine.model_info
    kv = next((pool.capacity for pool in stats.pools if pool.name == KV_POOL), 0)
    values = values_of(config)
    # Sized by the device where it is not set, so known once the engine runs.
    values["chunked_prefill_size"] = values["chunked_prefill_size"] or stats.chunked_prefill_size
    settings = {name: values[name] for name in names.CONFIG_INFO.labels}
    return ServerView(
        stats,
        handle.state,
        singles=(
            (names.WAITING_LIMIT, config.max_queued),
            (names.FRONTENDS_RUNNING, frontends),
            (names.STARTUP_SECONDS, handle.startup_seconds),
            (names.MEMORY_SHARE, memory_share()),
            (names.DRAIN_SECONDS, handle.drain_seconds),
            (names.DRAIN_LIMIT_SECONDS, config.drain_linger + config.drain_grace + DRAIN_MARGIN_SECONDS),
        ),
        infos=(
            (names.CACHE_CONFIG_INFO, (str(stats.page_size), str(kv))),
            (
                names.BUILD_INFO,
                (version, *((info.name, info.dtype, info.architecture, info.quantization) if info else ("",) * 4)),
            ),
            *(((control.WEIGHTS_INFO, (stats.weight_version,)),) if stats.weight_version else ()),
            (names.CONFIG_INFO, tuple(str(value).lower() for value in settings.values())),
        ),
    )


def kv_usage(stats: EngineStats) -> float:
    """Share of the fullest memory pool that live requests hold, 0 to 1; 0 before there are pools.

    KV pages, window pages, encoder pages and recurrent states run out independently. The first pool that is full keeps
    requests waiting; a mean over pools would hide it.
    """
    shares = (pool.used / pool.capacity for pool in stats.pools if pool.capacity and pool.name not in NOT_MEMORY)
    return max(shares, default=0.0)


class EngineCollector(Collector):
    """A collector over `view()`, which may be called from any thread."""

    def __init__(self, view: Callable[[], ServerView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Family]:
        """All families of one snapshot."""
        view = self._view()
        stats = view.stats
        yield from _pools(stats)
        yield from (_single(metric, getattr(stats, metric.field)) for metric in names.SNAPSHOT)
        yield from (_single(metric, getattr(stats, metric.field)) for metric in control.SINGLES)
        yield _labelled(control.ACTIVITY, {each.value: float(each is stats.activity) for each in Activity})
        yield from _drafts(stats.drafts or DraftStats())
        yield from _transfers(stats.transfers or TransferStats())
        for metric in replicas.BY_REPLICA:
            yield _labelled(metric, {each.name: float(getattr(each, metric.field)) for each in stats.replicas})
        yield from (_single(metric, value) for metric, value in view.singles)
        yield _single(names.KV_CACHE_USAGE, kv_usage(stats))
        yield from _histograms(stats)
        yield _labelled(names.COMPUTED_TOKENS, dict.fromkeys(("prefill", "decode"), 0) | stats.computed_tokens)
        yield _labelled(names.PHASE_SECONDS, dict.fromkeys(PHASES, 0.0) | stats.phase_seconds)
        yield _labelled(names.ASSERT_FAILURES, stats.assert_failures)
        yield _labelled(names.REQUESTS_FINISHED, dict.fromkeys(_ALWAYS_FINISHED, 0) | stats.finished)
        yield _single(names.READY, float(view.state is EngineState.READY and stats.activity.invites))
        yield _single(names.DRAINING, float(view.state is EngineState.DRAINING))
        for metric, labels in view.infos:
            info = _family(metric)
            info.add_metric(labels, 1)
            yield info


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return make(metric.name, metric.help, labels=metric.labels)


def _single(metric: Metric, value: float) -> Family:
    family = _family(metric)
    family.add_metric([], value)
    return family


def _labelled(metric: Metric, values: Mapping[str, float]) -> Family:
    family = _family(metric)
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family


def _drafts(stats: DraftStats) -> Iterator[Family]:
    yield from (_single(metric, getattr(stats, metric.field)) for metric in speculation.SINGLES)
    for metric in speculation.BY_POSITION:
        values = getattr(stats, metric.field)
        yield _labelled(metric, {str(position): value for position, value in enumerate(values)})
    yield _histogram(speculation.ACCEPTANCE_LENGTH, stats.lengths)


def _transfers(stats: TransferStats) -> Iterator[Family]:
    yield from (_single(metric, getattr(stats, metric.field)) for metric in transfers.SINGLES)
    yield _labelled(transfers.FAILURES, stats.failures)


def _pools(stats: EngineStats) -> Iterator[Family]:
    for metric, attribute in (
        (names.POOL_CAPACITY, "capacity"),
        (names.POOL_USED, "used"),
        (names.POOL_CACHED, "cached"),
    ):
        yield _labelled(metric, {pool.name: getattr(pool, attribute) for pool in stats.pools})


def _histograms(stats: EngineStats) -> Iterator[Family]:
    for key, metric in HISTOGRAMS.items():
        yield _histogram(metric, stats.histograms.get(key))


def _histogram(metric: Metric, recorded: HistogramStats | None) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help)
    if recorded is not None:
        family.add_metric([], buckets=_buckets(recorded), sum_value=recorded.total)
    return family


def _buckets(recorded: HistogramStats) -> list[Bucket]:
    """Cumulative counts by upper bound, as Prometheus writes it, with exemplars if recorded; the last is +Inf."""
    bounds = [f"{bound:.12g}" for bound in recorded.bounds[:-1]] + ["+Inf"]
    found: list[Bucket] = list(zip(bounds, map(float, recorded.counts), strict=True))
    for place, traced in enumerate(recorded.exemplars):
        if traced is not None:
            found[place] = (*found[place][:2], Exemplar({"trace_id": traced.trace_id}, traced.value))
    return found
