"""Helm 3.6 and Helm 4 render the same objects, and refuse the same values."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.packaging.helm.chart import NAMESPACE, RELEASE, Helm4, Object, Rendered, objects_of
from tests.packaging.helm.matrix import ACCEPTED, REFUSED, Values
from tests.support.tools import helm3

# Without a cluster it takes Kubernetes for 1.20, which the chart does not support.
KUBERNETES = "--kube-version=1.31.0"

pytestmark = pytest.mark.tools


@pytest.fixture(scope="module")
def program() -> Path:
    return helm3()


def run(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *args], capture_output=True, text=True, timeout=60, check=False)


def template(program: Path, chart: Path, values: Values, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    release = ("template", RELEASE, str(chart), "--namespace", NAMESPACE, "-f", str(file))
    return run(program, *release, KUBERNETES)


def told_apart(objects: list[Object]) -> list[Object]:
    return Rendered(objects).sorted()


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_same_objects(program: Path, helm4: Helm4, name: str, tmp_path: Path) -> None:
    done = template(program, helm4.chart, ACCEPTED[name], tmp_path)
    assert done.returncode == 0, done.stderr
    assert told_apart(objects_of(done.stdout)) == helm4.render(ACCEPTED[name]).sorted()


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_refusals(program: Path, chart: Path, name: str, tmp_path: Path) -> None:
    values, words = REFUSED[name]
    done = template(program, chart, values, tmp_path)
    assert done.returncode != 0
    # The two name a place in the values with dots and with slashes.
    assert words.strip("/").replace("/", ".") in done.stderr.replace("/", ".")


def test_lint_and_package(program: Path, chart: Path, tmp_path: Path) -> None:
    linted = run(program, "lint", "--strict", str(chart))
    assert linted.returncode == 0 and "0 chart(s) failed" in linted.stdout, linted.stdout
    assert "WARNING" not in linted.stdout and "ERROR" not in linted.stdout
    packed = run(program, "package", str(chart), "--destination", str(tmp_path))
    assert packed.returncode == 0 and list(tmp_path.glob("slipstream-*.tgz")), packed.stderr
