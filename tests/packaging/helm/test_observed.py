"""Rules and dashboard of the chart's files arrive in their objects unchanged, and Prometheus would take the rules."""

from __future__ import annotations

import json
import shutil
import subprocess
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config.server_config import ServerConfig
from service.metrics.door import names_of
from service.metrics.visitors import why_not
from tests.packaging.helm.chart import Helm4, Refused, copied
from tests.packaging.helm.matrix import OBSERVED

pytestmark = pytest.mark.tools

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


def scraped_as(helm4: Helm4, values: dict[str, Any], host: str) -> bool:
    """Whether the server, started as the chart starts it, answers a scraper that comes by this name or address."""
    (container,) = helm4.render(values).one("Deployment")["spec"]["template"]["spec"]["containers"]
    (given,) = (each.partition("=")[2] for each in container["args"] if each.startswith("--metrics-names="))
    asked = Message()
    asked["Host"] = host
    return why_not("GET", asked, names_of(ServerConfig.of(metrics_names=given))) is None


@pytest.mark.parametrize(
    "host",
    [
        "10.42.7.19:9464",
        "[fd00:10:244::7]:9464",
        "demo-slipstream-pods:9464",
        "demo-slipstream-pods.models:9464",
        "demo-slipstream-pods.models.svc:9464",
        "demo-slipstream-pods.models.svc.cluster.local:9464",
        "demo-slipstream-pods.models.svc.cluster.local.:9464",
        "10-42-7-19.demo-slipstream-pods.models.svc.cluster.local:9464",
    ],
)
def test_a_prometheus_in_the_cluster_is_answered_by_default(helm4: Helm4, host: str) -> None:
    """By the address of a pod, as ServiceMonitors and annotations have it, and by every name of the Service."""
    assert scraped_as(helm4, {"metrics": {"enabled": True}}, host)


def test_names_of_the_operator_come_beside_those_of_the_chart(helm4: Helm4) -> None:
    mine = {"metrics": {"enabled": True}, "settings": {"metrics_names": "metrics.example.org"}}
    for host in ("metrics.example.org", "demo-slipstream-pods.models.svc"):
        assert scraped_as(helm4, mine, host)
    assert not scraped_as(helm4, {}, "metrics.example.org")
    for foreign in ("demo-slipstream-pods.models.example", "evil-demo-slipstream-pods.models.svc", "models.svc"):
        assert not scraped_as(helm4, mine, foreign)
