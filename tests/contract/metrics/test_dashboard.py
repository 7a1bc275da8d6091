"""The dashboard and the rules against the table of metrics, and the dashboard as Grafana's own types read it."""

from __future__ import annotations

import pytest

from service.metrics import names
from tests.contract.metrics.dashboard import dashboard, metrics_named, queries

pytestmark = pytest.mark.tools

PARTS = ("_bucket", "_sum", "_count")


def test_every_metric_that_is_read_exists() -> None:
    exported = {metric.exported for metric in names.ALL}
    exported |= {metric.exported + part for metric in names.ALL if metric.kind == "histogram" for part in PARTS}
    assert metrics_named() <= exported, f"no such metric: {metrics_named() - exported}"
    assert len(metrics_named()) > 40


def test_counters_are_read_as_rates_and_every_query_can_be_narrowed_down() -> None:
    counters = {metric.exported for metric in names.ALL if metric.kind == "counter"}
    for query in queries():
        assert '{job=~"$job",instance=~"$instance"' in query.expr, query
        # Failures that happened are shown as a number, everything else that counts as what it does per second.
        if query.panel == "Assert failures":
            continue
        for counter in counters:
            if counter in query.expr:
                assert f"rate({counter}{{" in query.expr or f"increase({counter}{{" in query.expr, query


def test_panels_have_places_and_names_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells


def test_grafana_reads_it() -> None:
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard",
        reason="Grafana's types are not installed: pip install grafana-foundation-sdk",
    )
    read = models.Dashboard.from_json(dashboard())
    assert read.title == "Slipstream" and len(read.panels) == len(dashboard()["panels"])
    assert [variable.name for variable in read.templating.list_val] == ["datasource", "job", "instance"]
