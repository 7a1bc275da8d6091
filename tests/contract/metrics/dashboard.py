"""What the dashboard and the rules ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tests.support.repository import ROOT

FILES = ROOT / "helm" / "slipstream" / "files"
DASHBOARD, RULES = FILES / "dashboard.json", FILES / "rules.yaml"
METRIC = re.compile(r"\bslipstream_[a-z0-9_]+")


@dataclass(frozen=True)
class Query:
    """One expression of one panel."""

    group: str
    panel: str
    expr: str

    def over(self, window: str) -> str:
        """As Grafana sends it: for all jobs and servers, rates over `window`."""
        expr = self.expr.replace("$__rate_interval", window).replace('"$job"', '".*"').replace('"$instance"', '".*"')
        assert "$" not in expr, f"{self.panel} uses a variable that nobody fills in: {expr}"
        return expr


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana gets it."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> list[Query]:
    """Every query of every panel, with the row that it is in."""
    found, group = [], ""
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            group = panel["title"]
        found += [Query(group, panel["title"], target["expr"]) for target in panel.get("targets", ())]
    return found


def rule_expressions() -> Iterator[tuple[str, str]]:
    """Alert and expression."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def metrics_named() -> set[str]:
    """Names of every metric that a panel, a variable, an annotation or a rule reads."""
    text = " ".join([*(json.dumps(dashboard()["templating"]), json.dumps(dashboard()["annotations"]))])
    exprs = [*(query.expr for query in queries()), *(expr for _, expr in rule_expressions()), text]
    return {name for expr in exprs for name in METRIC.findall(expr)}
