"""Rules and dashboard of the chart's files arrive in their objects unchanged, and Prometheus would take the rules."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import Helm4, Refused, copied
from tests.helm.matrix import OBSERVED

MINE = OBSERVED["metrics"]["prometheusRule"]["additionalGroups"]


def test_objects_hold_what_the_files_hold(helm4: Helm4) -> None:
    rendered = helm4.render(OBSERVED)
    rules = yaml.safe_load((helm4.chart / "files" / "rules.yaml").read_text())
    assert rendered.one("PrometheusRule")["spec"] == {"groups": [*rules["groups"], *MINE]}
    dashboard = json.loads((helm4.chart / "files" / "dashboard.json").read_text())
    config = rendered.one("ConfigMap", "-dashboard")
    assert json.loads(config["data"]["slipstream.json"]) == dashboard
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert rendered.one("ServiceMonitor")["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_promtool_takes_the_rules(helm4: Helm4, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(helm4.render(OBSERVED).one("PrometheusRule")["spec"]))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind, name", [("prometheusRule", "rules.yaml"), ("dashboard", "dashboard.json")])
def test_a_chart_without_its_files_says_so(tmp_path: Path, kind: str, name: str) -> None:
    chart = copied(tmp_path)
    (chart / "files" / name).unlink()
    with pytest.raises(Refused, match=f"files/{name} is missing from the chart"):
        Helm4(chart).render({"metrics": {kind: {"enabled": True}}})
