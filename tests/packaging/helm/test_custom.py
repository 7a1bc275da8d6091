"""Objects of the Prometheus operator and of KEDA meet the schemas of their custom resources."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.helm import worker_sets
from tests.packaging.helm.chart import Helm4, Object, Rendered
from tests.packaging.helm.matrix import ACCEPTED
from tests.packaging.helm.schemas import CUSTOM
from tests.support.tools import MODELS, node_modules

SCRIPT = Path(__file__).with_name("custom.mjs")

pytestmark = pytest.mark.tools


def findings(objects: list[Object]) -> list[str | None]:
    """What the schemas have against each; the schemas let unknown fields pass."""
    done = subprocess.run(
        ["node", str(SCRIPT)],
        input=json.dumps(objects),
        env=os.environ | {"NODE_MODULES": str(node_modules(*MODELS))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str | None] = json.loads(done.stdout)
    return found


def test_every_custom_object_of_the_matrix(helm4: Helm4) -> None:
    objects = [each for values in ACCEPTED.values() for each in helm4.render(values).objects if each["kind"] in CUSTOM]
    assert {each["kind"] for each in objects} == CUSTOM
    assert findings(objects) == [None] * len(objects)


BREAKS: dict[str, Callable[[Rendered], Any]] = {
    "ServiceMonitor": lambda r: r.one("ServiceMonitor")["spec"].pop("selector"),
    "PrometheusRule": lambda r: r.one("PrometheusRule")["spec"]["groups"][0]["rules"][0].pop("expr"),
    "ScaledObject": lambda r: r.one("ScaledObject")["spec"].update(maxReplicaCount="8"),
}


def test_breaks_are_noticed(helm4: Helm4) -> None:
    broken = []
    for kind, breakage in BREAKS.items():
        rendered = Rendered(copy.deepcopy(helm4.render(ACCEPTED["all at once"]).objects))
        breakage(rendered)
        broken.append(rendered.one(kind))
    assert all(findings(broken)), findings(broken)


SETS = [name for name, values in ACCEPTED.items() if "nodes" in values]


@pytest.mark.parametrize("name", SETS)
def test_leader_worker_sets_have_the_fields_of_their_kind(helm4: Helm4, name: str) -> None:
    assert worker_sets.findings(helm4.render(ACCEPTED[name]).one(worker_sets.KIND)) == []


WRONG: dict[str, Callable[[Object], Any]] = {
    "spec.leaderWorkerTemplate.sizes is no field": lambda e: e["spec"]["leaderWorkerTemplate"].update(sizes=2),
    "spec.leaderWorkerTemplate.workerTemplate is needed": lambda e: e["spec"]["leaderWorkerTemplate"].pop(
        "workerTemplate"
    ),
    "spec.leaderWorkerTemplate.size is '2'": lambda e: e["spec"]["leaderWorkerTemplate"].update(size="2"),
    "spec.startupPolicy is 'Early', not one of ['LeaderCreated', 'LeaderReady']": lambda e: e["spec"].update(
        startupPolicy="Early"
    ),
    "leaderworkerset.x-k8s.io/v2 is no leaderworkerset.x-k8s.io/v1": lambda e: e.update(
        apiVersion="leaderworkerset.x-k8s.io/v2"
    ),
}


@pytest.mark.parametrize("told", WRONG)
def test_other_fields_are_noticed(helm4: Helm4, told: str) -> None:
    broken = copy.deepcopy(helm4.render(ACCEPTED["nodes"]).one(worker_sets.KIND))
    WRONG[told](broken)
    assert worker_sets.findings(broken) == [told]
