"""Metrics that cannot be written: the scraper is told so, and the log why, once."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from service.metrics.http import MetricsServer

PATIENCE = 20.0


class Unwritable(Collector):
    """A label that is no text, as long as `bad`."""

    bad = True

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: registering it renders nothing."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One gauge of one label."""
        family = GaugeMetricFamily("calls", "By tenant.", labels=["tenant"])
        family.add_metric(["\ud800" if self.bad else "alice"], 1.0)
        yield family


def asked(server: MetricsServer) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=PATIENCE) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def test_the_scraper_hears_of_it_and_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, registry = Unwritable(), CollectorRegistry()
    registry.register(broken)
    server = MetricsServer("127.0.0.1", 0, registry)
    try:
        with caplog.at_level(logging.ERROR):
            for _ in range(5):
                assert asked(server) == (500, "the metrics cannot be written; the log says why\n")
        (line,) = caplog.messages
        assert line.startswith("the metrics cannot be written: UnicodeEncodeError: ") and len(line) < 300
        broken.bad = False
        status, text = asked(server)
        assert (status, 'calls{tenant="alice"} 1.0' in text) == (200, True)
    finally:
        server.close()
