"""Every rule holds over every combination of values, and each of them notices what it is for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.packaging.helm import rules
from tests.packaging.helm.chart import Helm4, Rendered
from tests.packaging.helm.matrix import ACCEPTED

pytestmark = pytest.mark.tools

FULL = ACCEPTED["all at once"]
Break = Callable[[Rendered], Any]


def spec(rendered: Rendered) -> dict[str, Any]:
    return rendered.one("Deployment")["spec"]


def pod(rendered: Rendered) -> Any:
    return spec(rendered)["template"]["spec"]


def server(rendered: Rendered) -> Any:
    return pod(rendered)["containers"][0]


BREAKS: dict[str, tuple[rules.Rule, Break]] = {
    "label of the pods that selects": (
        rules.selectors,
        lambda r: spec(r)["template"]["metadata"]["labels"].update({"app.kubernetes.io/component": "x"}),
    ),
    "test pod looks like a server": (
        rules.selectors,
        lambda r: r.test_pod["metadata"]["labels"].update({"app.kubernetes.io/component": "server"}),
    ),
    "container port": (rules.ports, lambda r: server(r)["ports"][0].update(containerPort=99999)),
    "target port": (rules.ports, lambda r: r.all("Service")[0]["spec"]["ports"][0].update(targetPort="http")),
    "probe of the port with TLS": (rules.ports, lambda r: server(r)["livenessProbe"]["grpc"].update(port=50051)),
    "liveness asks for readiness": (
        rules.ports,
        lambda r: server(r)["livenessProbe"]["grpc"].update(service="slipstream.v1.InferenceService"),
    ),
    "open policy": (rules.ports, lambda r: r.one("NetworkPolicy")["spec"]["ingress"][0]["ports"].append({"port": 1})),
    "flag that is none": (rules.flags, lambda r: server(r)["args"].append("--tensor-parallel-size=2")),
    "value that is none": (rules.flags, lambda r: server(r)["args"].append("--page-size=big")),
    "flag of the test": (rules.flags, lambda r: r.test_pod["spec"]["containers"][0]["args"].insert(1, "--quick")),
    "variable that is none": (
        rules.environment,
        lambda r: server(r)["env"].append({"name": "SLIPSTREAM_TENSOR_PARALLEL_SIZE", "value": "1"}),
    ),
    "home on the read-only root": (
        rules.environment,
        lambda r: server(r)["env"].append({"name": "HOME", "value": "/"}),
    ),
    "service links": (rules.environment, lambda r: pod(r).pop("enableServiceLinks")),
    "mount without volume": (
        rules.mounts,
        lambda r: server(r)["volumeMounts"].append({"name": "x", "mountPath": "/x"}),
    ),
    "volume without mount": (rules.mounts, lambda r: pod(r)["volumes"].append({"name": "x", "emptyDir": {}})),
    "secret by subPath": (rules.mounts, lambda r: server(r)["volumeMounts"][-1].update(subPath="tls.crt")),
    "file that is not mounted": (rules.mounts, lambda r: server(r)["volumeMounts"].pop()),
    "grace": (rules.times, lambda r: pod(r).update(terminationGracePeriodSeconds=44)),
    "deadline": (rules.times, lambda r: spec(r).update(progressDeadlineSeconds=300)),
    "rollout": (rules.times, lambda r: spec(r)["strategy"]["rollingUpdate"].update(maxUnavailable=0)),
    "request": (rules.resources, lambda r: server(r)["resources"]["requests"].update(memory="4Gi")),
    "half a device": (rules.resources, lambda r: server(r)["resources"]["limits"].update({"nvidia.com/gpu": "0.5"})),
    "root": (rules.restricted, lambda r: pod(r)["securityContext"].update(runAsUser=0)),
    "writable root": (rules.restricted, lambda r: server(r)["securityContext"].pop("readOnlyRootFilesystem")),
    "node's IPC": (rules.restricted, lambda r: pod(r).update(hostIPC=True)),
    "hostPath": (rules.restricted, lambda r: pod(r)["volumes"].append({"name": "h", "hostPath": {"path": "/"}})),
    "name": (rules.identity, lambda r: r.one("ScaledObject")["metadata"].update(name="-a")),
    "one name twice": (rules.identity, lambda r: r.objects.append(r.objects[0])),
    "account": (rules.identity, lambda r: pod(r).update(serviceAccountName="other")),
    "replicas beside a scaler": (rules.scaling, lambda r: spec(r).update(replicas=1)),
    "scaler of nothing": (rules.scaling, lambda r: r.one("ScaledObject")["spec"]["scaleTargetRef"].update(name="x")),
    "metric that is none": (
        rules.scaling,
        lambda r: r.one("ScaledObject")["spec"]["triggers"][0]["metadata"].update(query="slipstream_queue"),
    ),
    "ports that NIXL does not use": (
        rules.ports,
        lambda r: r.server["env"].append({"name": "UCX_TCP_PORT_RANGE", "value": "1-2"}),
    ),
    "open to everybody": (rules.ports, lambda r: r.one("NetworkPolicy")["spec"]["ingress"][0].pop("from")),
    "scraped twice": (
        rules.scraping,
        lambda r: r.all("Service")[0]["spec"]["ports"].append({"name": "metrics", "port": 1, "targetPort": "metrics"}),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_rule_holds(helm4: Helm4, name: str) -> None:
    rendered = helm4.render(ACCEPTED[name])
    findings = [f"{rule.__name__}: {finding}" for rule in rules.RULES for finding in rule(rendered)]
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("name", BREAKS)
def test_a_rule_notices(helm4: Helm4, name: str) -> None:
    rule, breakage = BREAKS[name]
    rendered = helm4.render(FULL)
    assert not list(rule(rendered))
    broken = Rendered(copy.deepcopy(rendered.objects))
    breakage(broken)
    assert list(rule(broken)), "broken, and not noticed"


BREAKS_OF_SEVERAL: dict[str, tuple[rules.Rule, Break]] = {
    "calls for what only computes": (
        rules.selectors,
        lambda r: worker(r)["metadata"]["labels"].update({"app.kubernetes.io/component": "server"}),
    ),
    "policy of the first pod alone": (
        rules.selectors,
        lambda r: r.one("NetworkPolicy")["spec"]["podSelector"]["matchExpressions"][0].update(values=["server"]),
    ),
    "other settings": (rules.flags, lambda r: worker(r)["spec"]["containers"][0]["args"].append("--page-size=32")),
    "first of all": (rules.flags, lambda r: worker(r)["spec"]["containers"][0]["args"].append("--node-rank=0")),
    "probed": (rules.flags, lambda r: worker(r)["spec"]["containers"][0].update(livenessProbe={})),
    "tokens of callers": (
        rules.flags,
        lambda r: worker(r)["spec"]["containers"][0]["volumeMounts"].append({"name": "auth", "mountPath": "/a"}),
    ),
    "ends first": (rules.times, lambda r: worker(r)["spec"].update(terminationGracePeriodSeconds=5)),
    "apart": (rules.ports, lambda r: r.one("NetworkPolicy")["spec"]["egress"].pop(0)),
    "open to others": (rules.ports, lambda r: r.one("NetworkPolicy")["spec"]["ingress"][0].pop("ports")),
    "scales a Deployment": (
        rules.scaling,
        lambda r: r.one("ScaledObject")["spec"]["scaleTargetRef"].update(apiVersion="apps/v1", kind="Deployment"),
    ),
}


def worker(rendered: Rendered) -> Any:
    return rendered.worker_template


@pytest.mark.parametrize("name", BREAKS_OF_SEVERAL)
def test_a_rule_notices_of_several_nodes(helm4: Helm4, name: str) -> None:
    rule, breakage = BREAKS_OF_SEVERAL[name]
    rendered = helm4.render(ACCEPTED["nodes, all at once"])
    assert not list(rule(rendered))
    broken = Rendered(copy.deepcopy(rendered.objects))
    breakage(broken)
    assert list(rule(broken)), "broken, and not noticed"


@pytest.mark.parametrize("name", [name for name in ACCEPTED if name != "named" and "nodes" not in ACCEPTED[name]])
def test_what_selects_never_changes(helm4: Helm4, name: str) -> None:
    """A Deployment's selector cannot be changed: an upgrade that tried would fail."""
    assert helm4.render(ACCEPTED[name]).one("Deployment")["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "slipstream",
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": "server",
    }
