"""Trivy finds nothing in what is rendered, nor in the Dockerfile, but what `helm/trivyignore.yaml` explains."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.packaging.helm.chart import Helm4, Object
from tests.packaging.helm.matrix import ACCEPTED
from tests.support.repository import ROOT
from tests.support.tools import trivy

pytestmark = pytest.mark.tools

SKIPPED = ROOT / "helm" / "trivyignore.yaml"
SCANNED = ("defaults", "cpu", "downloaded", "secure", "all at once")
QUIET = ("--skip-check-update", "--skip-version-check", "--disable-telemetry", "--quiet", "--format", "json")


@pytest.fixture(scope="module")
def program() -> Path:
    return trivy()


def found(program: Path, target: Path, *flags: str) -> set[str]:
    """Findings as "check: message"."""
    done = subprocess.run(
        [str(program), "config", *QUIET, *flags, str(target)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["Results"]
    assert sum(each["MisconfSummary"]["Successes"] for each in results) > 20, "it looked at nothing"
    return {f"{each['ID']}: {each['Message']}" for one in results for each in one.get("Misconfigurations", ())}


def written(folder: Path, manifests: dict[str, list[Object]]) -> Path:
    for name, objects in manifests.items():
        (folder / f"{name.replace(' ', '-')}.yaml").write_text(yaml.safe_dump_all(objects))
    return folder


def test_nothing_but_what_is_listed_with_a_reason(program: Path, helm4: Helm4, tmp_path: Path) -> None:
    rendered = {name: helm4.render(ACCEPTED[name]).objects for name in SCANNED}
    folder = written(tmp_path, rendered)
    assert not found(program, folder, "--ignorefile", str(SKIPPED))
    listed = yaml.safe_load(SKIPPED.read_text())["misconfigurations"]
    assert all(len(each["statement"]) > 40 for each in listed)
    assert {each.partition(":")[0] for each in found(program, folder)} == {each["id"] for each in listed}


def test_a_hole_is_noticed(program: Path, helm4: Helm4, tmp_path: Path) -> None:
    objects = copy.deepcopy(helm4.render(ACCEPTED["cpu"]).objects)
    pod = next(each for each in objects if each["kind"] == "Deployment")["spec"]["template"]["spec"]
    pod["containers"][0]["securityContext"] = {"privileged": True}
    folder = written(tmp_path, {"hole": objects})
    assert any("privileged" in each for each in found(program, folder, "--ignorefile", str(SKIPPED)))


def test_the_dockerfile(program: Path) -> None:
    assert not found(program, ROOT / "Dockerfile")
