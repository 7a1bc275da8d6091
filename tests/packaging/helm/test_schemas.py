"""Every object of every combination meets the strict schemas of Kubernetes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.packaging.helm.chart import Helm4, Rendered
from tests.packaging.helm.matrix import ACCEPTED
from tests.packaging.helm.schemas import VERSIONS, Schemas

pytestmark = pytest.mark.tools

ENDS = (VERSIONS[0], VERSIONS[-1])


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    return Schemas()


def check(schemas: Schemas, helm4: Helm4, name: str, versions: tuple[str, ...]) -> None:
    rendered = helm4.render(ACCEPTED[name])
    found = [f"{each}: {finding}" for each in versions for finding in schemas.findings(rendered.objects, each)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ACCEPTED)
def test_oldest_and_newest(schemas: Schemas, helm4: Helm4, name: str) -> None:
    check(schemas, helm4, name, ENDS)


@pytest.mark.soak
@pytest.mark.parametrize("version", [each for each in VERSIONS if each not in ENDS])
def test_between(schemas: Schemas, helm4: Helm4, version: str) -> None:
    for name in ACCEPTED:
        check(schemas, helm4, name, (version,))


BREAKS: dict[str, Callable[[Rendered], Any]] = {
    "misspelt field": lambda r: r.server.update(livenesProbe={}),
    "misspelt probe": lambda r: r.server["livenessProbe"].update(grpcc=r.server["livenessProbe"].pop("grpc")),
    "text for a number": lambda r: r.one("Deployment")["spec"].update(replicas="1"),
    "kind that is none": lambda r: r.one("NetworkPolicy").update(kind="NetworkPolicies"),
}


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("version", ENDS)
def test_a_break_is_noticed(schemas: Schemas, helm4: Helm4, name: str, version: str) -> None:
    broken = Rendered(copy.deepcopy(helm4.render(ACCEPTED["cpu"]).objects))
    BREAKS[name](broken)
    assert schemas.findings(broken.objects, version)
