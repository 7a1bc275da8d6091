"""One rendering serves all who wait for one, and nobody gets one from before the question."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from service.metrics.exposition import Exposition

PATIENCE = 20.0
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


class Slow(Collector):
    """Counts its renderings; each is begun, and waits until the test lets it end."""

    def __init__(self) -> None:
        self.renderings = 0
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: registering it renders nothing."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One gauge, the number of the rendering."""
        self.renderings += 1
        number = self.renderings
        self.begun.release()
        assert self.may_end.acquire(timeout=PATIENCE)
        yield GaugeMetricFamily("rendering", "Its number.", value=number)


def number_in(answer: Future[tuple[bytes, str]]) -> float:
    text, _ = answer.result(timeout=PATIENCE)
    (line,) = (line for line in text.decode().splitlines() if line.startswith("rendering "))
    return float(line.split()[1])


def asked(
    exposition: Exposition, pool: ThreadPoolExecutor, count: int, accept: str = ""
) -> list[Future[tuple[bytes, str]]]:
    """So many questions; returns once all of them have been asked."""
    before, futures = exposition._moments, [pool.submit(exposition.text, accept) for _ in range(count)]
    end = time.monotonic() + PATIENCE
    while int(repr(before)[6:-1]) < count + 2:
        assert time.monotonic() < end, "not all of them have asked"
        time.sleep(0.001)
    return futures


def test_those_who_wait_share_a_rendering_and_it_was_begun_after_they_asked() -> None:
    slow, registry = Slow(), CollectorRegistry()
    registry.register(slow)
    exposition = Exposition(registry)
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(exposition.text, "")
        assert slow.begun.acquire(timeout=PATIENCE)
        others = asked(exposition, pool, 8)
        slow.may_end.release(2)
        assert number_in(first) == 1
        assert {number_in(each) for each in others} == {2}, "the first was begun before they asked"
        assert slow.renderings == 2
        slow.may_end.release()
        assert number_in(pool.submit(exposition.text, "")) == 3


def test_each_format_is_rendered_for_itself() -> None:
    slow, registry = Slow(), CollectorRegistry()
    registry.register(slow)
    exposition = Exposition(registry)
    slow.may_end.release(2)
    plain, openmetrics = exposition.text(""), exposition.text(OPEN_METRICS)
    assert plain[1].startswith("text/plain") and openmetrics[1].startswith("application/openmetrics-text")
    assert openmetrics[0].endswith(b"# EOF\n") and not plain[0].endswith(b"# EOF\n")
