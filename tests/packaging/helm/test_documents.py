"""Values, schema, table and templates say the same, and so do the chart and the server."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from core.errors import StartupError
from helm import generate
from service.access.tenant_file import MAX_WEIGHT, MIN_WEIGHT, TenantLimits, parse_tenants
from service.checkpoints.model_name import hub_model
from service.config.server_config import ServerConfig
from service.config.sources import settings_of, values_of
from tests.packaging.helm.chart import CHART, Helm4, Refused, merged
from tests.packaging.helm.matrix import ACCEPTED, EVERY_SETTING, SECURE
from tests.packaging.helm.rules import config_of
from tests.packaging.helm.schemas import VERSIONS
from tests.support.repository import ROOT

pytestmark = pytest.mark.tools

VALUES = yaml.safe_load(generate.VALUES.read_text())
SCHEMA = json.loads(generate.SCHEMA.read_text())
TABLE = generate.PAGE.read_text()
GUIDE = (ROOT / "docs" / "how-to" / "deploy.md").read_text()


def leaves(node: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of what is no map, or an empty one."""
    if not isinstance(node, dict) or not node:
        yield path
        return
    for key, value in node.items():
        yield from leaves(value, f"{path}.{key}" if path else key)


def test_what_is_generated_is_current() -> None:
    assert generate.renewed_page(TABLE) == TABLE, "run python -m helm.generate"
    text = generate.SCHEMA.read_text()
    assert generate.renewed_schema(text) == text, "run python -m helm.generate"


def test_every_value_is_documented() -> None:
    told = generate.documented(generate.VALUES.read_text())
    above = {path: any(f"{path}.".startswith(f"{each}.") for each in told) for path in leaves(VALUES)}
    assert [path for path, known in above.items() if not known] == []
    assert all(text.endswith((".", "`")) for text in told.values())


@pytest.mark.parametrize("name", [key for key in VALUES if isinstance(VALUES[key], dict)])
def test_the_schema_knows_exactly_the_values(name: str) -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        if "properties" not in schema or path == "settings":
            return
        assert schema["additionalProperties"] is False, f"{path} takes anything"
        assert set(schema["properties"]) == set(values), path
        for key, value in values.items():
            if isinstance(value, dict):
                compare(value, schema["properties"][key], f"{path}.{key}")

    compare(VALUES[name], SCHEMA["properties"][name], name)


def test_the_schema_knows_every_value_at_the_top() -> None:
    assert set(SCHEMA["properties"]) - {"global"} == set(VALUES)
    assert SCHEMA["additionalProperties"] is False


BASES = (
    "all at once",
    "claim of a class",
    "existing claim",
    "hpa",
    "budget by minimum",
    "cpu",
    "mig",
    "by name",
    "prefill",
    "decode",
    "prefill by NIXL",
    "nodes",
    "kept files",
)
OTHERS: dict[str, tuple[Any, ...]] = {
    "imagePullSecrets": ([{"name": "other"}],),
    "drain.terminationGracePeriodSeconds": (9999,),
    "rollout.progressDeadlineSeconds": (9999,),
    "podDisruptionBudget.minAvailable": ("10%",),
    "autoscaling.type": ("none",),
    "model.source": ("bundled", "claim"),
    "image.pullPolicy": ("Always",),
    "model.init.enabled": (True, False),
    "model.name": ("org/other",),
    "ports.grpc": (6000,),
    "role": ("both",),
    "transfer.port": (9001,),
    "transfer.peers": ("10.1.0.0/16",),
    "transfer.nixlPorts": ("9100-9107",),
    "image.digest": ("sha256:" + "1" * 64,),
    "service.type": ("NodePort",),
    "listenAddress": ("::",),
    "gpu.resource": ("amd.com/gpu",),
    "diskCache.bytes": (1 << 31,),
    "settings": ({"page_size": 32},),
    "extraContainers": ([{"name": "other", "image": "x"}],),
    "model.claim.accessModes": (["ReadOnlyMany"],),
    "tenants": ({"other": {"concurrent_requests": 7}},),
    "metrics.prometheusRule.additionalGroups": ([{"name": "other", "rules": []}],),
}
"""What some values can be instead; for the others their type says it."""
REFUSED_INSTEAD = {"nodes", "gpu.count"}
"""Values of which one alone fits the other ones."""


def others(path: str, value: Any) -> tuple[Any, ...]:
    """Contents that differ from the default."""
    if path in OTHERS:
        return OTHERS[path]
    by_type: dict[type, tuple[Any, ...]] = {
        bool: (not value,),
        int: (value + 1 if isinstance(value, int) else 1,),
        str: ("other", "7", "7Gi", "77s", "http://other"),
        list: ([{"name": "other", "topologyKey": "o", "maxSkew": 3, "whenUnsatisfiable": "DoNotSchedule"}], ["other"]),
        dict: ({"other": "7"},),
    }
    return by_type[type(value)]


@pytest.mark.parametrize("path", sorted(set(leaves(VALUES)) - REFUSED_INSTEAD))
def test_every_value_changes_what_is_rendered(helm4: Helm4, path: str) -> None:
    default: Any = VALUES
    for key in path.split("."):
        default = default[key]
    for other in others(path, default):
        change: Any = other
        for key in reversed(path.split(".")):
            change = {key: change}
        for base in BASES:
            try:
                if helm4.files(merged(ACCEPTED[base], change)) != helm4.files(ACCEPTED[base]):
                    return
            except Refused:
                continue
    raise AssertionError(f"no other {path} changes anything")


def test_settings_are_the_servers_own(helm4: Helm4) -> None:
    known = set(settings_of(ServerConfig))
    assert known >= generate.DECIDED_ELSEWHERE
    assert set(SCHEMA["properties"]["settings"]["properties"]) == known - generate.DECIDED_ELSEWHERE
    config = config_of(helm4.render(ACCEPTED["settings"]))
    for name, value in EVERY_SETTING.items():
        if name == "adapter":
            value = tuple(tuple(each.split("=")) for each in value)
        assert values_of(config)[name] == value, name


def test_tenants_are_given_what_the_servers_file_may_hold(helm4: Helm4) -> None:
    known = SCHEMA["properties"]["tenants"]["additionalProperties"]["properties"]
    assert set(known) == {field.name for field in dataclasses.fields(TenantLimits)}
    weight = known["weight"]
    assert (weight["minimum"], weight["maximum"]) == (MIN_WEIGHT, MAX_WEIGHT)
    for name, schema in known.items():
        for value, accepted in ((schema["minimum"], True), (schema["minimum"] - 1, False)):
            tenants = {"alice": {name: value}}
            assert _parses(tenants) == accepted, (name, value)
            assert _renders(helm4, tenants) == accepted, (name, value)


def _parses(tenants: dict[str, Any]) -> bool:
    try:
        parse_tenants(yaml.safe_dump(tenants).encode(), "tenants")
    except StartupError:
        return False
    return True


def _renders(helm4: Helm4, tenants: dict[str, Any]) -> bool:
    try:
        helm4.render(SECURE | {"tenants": tenants})
    except Refused:
        return False
    return True


def test_values_reach_the_server(helm4: Helm4) -> None:
    config = config_of(
        helm4.render(SECURE | {"drain": {"lingerSeconds": 7, "graceSeconds": 8}, "model": {"servedName": "m"}})
    )
    assert (config.drain_linger, config.drain_grace, config.engine.model.served_name) == (7, 8, "m")
    assert (config.engine.executor.device, config.health_port, config.admins) == ("cuda", 50052, "ops")
    assert config.client_names == {"gateway", "client"}
    assert (config.host, config.metrics_host, config.engine.model.path) == ("0.0.0.0", "127.0.0.1", "")
    assert config_of(helm4.render({"metrics": {"enabled": True}})).metrics_host == "0.0.0.0"
    assert config_of(helm4.render({"model": {"source": "claim", "path": "a/b/"}})).engine.model.path == "/models/a/b"


def test_a_model_by_name_is_fetched_into_its_volume(helm4: Helm4) -> None:
    def facts(model: dict[str, Any]) -> tuple[str, str, str, bool]:
        rendered = helm4.render({"model": model})
        server = rendered.server
        env = {each["name"]: each.get("value") for each in server["env"]}
        (mount,) = (each for each in server["volumeMounts"] if each["name"] == "model")
        return config_of(rendered).engine.model.path, env["HF_HOME"], env["HF_HUB_OFFLINE"], mount["readOnly"]

    found = facts({"source": "claim", "name": "org/model@v1"})
    assert found == ("org/model@v1", "/models/huggingface", "0", False)
    assert hub_model(found[0]) is not None
    assert facts({"source": "claim", "path": "llama"}) == ("/models/llama", "/cache/huggingface", "1", True)


@pytest.mark.parametrize(
    "limit, threads", [("500m", 1), (1, 1), ("2", 1), ("3500m", 2), (8, 7), ("8", 7), (None, None)]
)
def test_threads_follow_the_cpu_limit(helm4: Helm4, limit: Any, threads: int | None) -> None:
    values: dict[str, Any] = {"gpu": {"enabled": False}, "resources": {"requests": None, "limits": {"cpu": limit}}}
    assert config_of(helm4.render(values)).engine.executor.cpu_threads == threads
    assert config_of(helm4.render(values | {"settings": {"cpu_threads": 5}})).engine.executor.cpu_threads == 5
    assert config_of(helm4.render(values | {"gpu": {"enabled": True}})).engine.executor.cpu_threads == threads


def test_beside_a_gpu_the_request_stands_in_for_the_limit(helm4: Helm4) -> None:
    assert config_of(helm4.render()).engine.executor.cpu_threads == 3
    assert config_of(helm4.render({"resources": {"limits": {"cpu": 6}}})).engine.executor.cpu_threads == 5
    assert config_of(helm4.render({"gpu": {"enabled": False}})).engine.executor.cpu_threads is None


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    assert f"{VERSIONS[0]} to {VERSIONS[-1]}" in GUIDE
    assert f"slipstream:{project['version']}-cuda" in GUIDE


def test_the_tag_follows_the_device(helm4: Helm4) -> None:
    images = {name: helm4.render(ACCEPTED[name]).server["image"] for name in ("defaults", "cpu", "digest")}
    assert images["defaults"] == "slipstream:0.1.0-cuda"
    assert images["cpu"] == "slipstream:0.1.0-cpu"
    assert images["digest"].startswith("registry.example:5000/a/b@sha256:")


@pytest.mark.parametrize(
    "values, words",
    [
        ({}, "every client that reaches the port may call"),
        ({}, "no pod may call yet"),
        ({"metrics": {"enabled": True}}, "no pod may scrape yet"),
        ({"auth": {"existingSecret": "a"}}, "tokens travel in plain text"),
        (ACCEPTED["downloaded"], "networkPolicy.egress is empty"),
        (ACCEPTED["by name into a claim"], "networkPolicy.egress is empty"),
        (ACCEPTED["claim"] | {"replicas": 2}, "use ReadWriteMany"),
        (ACCEPTED["secure"], "gRPC, TLS"),
    ],
)
def test_notes_say_what_is_open(helm4: Helm4, values: dict[str, Any], words: str) -> None:
    assert words in helm4.render(values).notes
    quiet = ("reaches the port", "plain text", "egress is empty", "use ReadWriteMany", "may call yet", "may scrape yet")
    assert not any(each in helm4.render(SECURE).notes for each in quiet)


def test_values_that_the_guide_shows_are_accepted(helm4: Helm4) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    assert blocks
    for block in blocks:
        rendered = helm4.render(yaml.safe_load(block))
        fetched = config_of(rendered).engine.model.path == "org/model@main"
        assert fetched != bool(rendered.pod.get("initContainers")) and rendered.one("NetworkPolicy")["spec"]["egress"]


def test_shell_variables_that_the_guide_shows_are_values() -> None:
    for path in re.findall(r"--set ([\w.]+)=", GUIDE):
        node = VALUES
        for key in path.split("."):
            assert key in node, path
            node = node[key]
