"""The chart as Helm 4 renders it, and the objects that come out of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import ROOT

CHART = ROOT / "helm" / "slipstream"
CPU_VALUES = CHART / "values-cpu.yaml"
RELEASE, NAMESPACE = "demo", "models"

Object = dict[str, Any]

PLACEHOLDERS = {
    "files/rules.yaml": "groups:\n  - name: slipstream\n    rules:\n      - alert: SlipstreamNotReady\n"
    '        expr: slipstream_ready == 0\n        for: 1h\n        annotations: {summary: "{{ $labels.pod }}"}\n',
    "files/dashboard.json": '{"title": "slipstream", "panels": []}\n',
}
"""Stand for files of the chart that other work brings, where they are not there yet."""


def copied(folder: Path) -> Path:
    """The chart below `folder`, with what it reads from files."""
    chart = Path(shutil.copytree(CHART, folder / "slipstream"))
    for name, text in PLACEHOLDERS.items():
        path = chart / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(text)
    return chart


def merged(*values: dict[str, Any]) -> dict[str, Any]:
    """Values over values, as `-f one -f two` does it."""
    found: dict[str, Any] = {}
    for each in values:
        for key, value in each.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else value
    return found


def cpu_values() -> dict[str, Any]:
    """`values-cpu.yaml`."""
    return dict(yaml.safe_load(CPU_VALUES.read_text()))


class Rendered:
    """The objects of one rendering."""

    def __init__(self, objects: list[Object], notes: str = "") -> None:
        self.objects, self.notes = objects, notes

    def all(self, kind: str) -> list[Object]:
        """Of this kind."""
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, suffix: str = "") -> Object:
        """The only one of this kind whose name ends so."""
        (found,) = [each for each in self.all(kind) if each["metadata"]["name"].endswith(suffix)]
        return found

    @property
    def owner(self) -> Object:
        """What the pods are of: a Deployment, or for workers of several nodes a LeaderWorkerSet."""
        (found,) = self.all("Deployment") + self.all("LeaderWorkerSet")
        return found

    @property
    def template(self) -> Object:
        """The template of the server's pods."""
        spec = self.owner["spec"]
        return dict(spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["leaderTemplate"])

    @property
    def pod(self) -> Object:
        """Spec of the server's pods."""
        return dict(self.template["spec"])

    @property
    def worker_template(self) -> Object | None:
        """The template of pods that only compute; None where a worker is one pod."""
        found: Object | None = self.owner["spec"].get("leaderWorkerTemplate", {}).get("workerTemplate")
        return found

    @property
    def server(self) -> Object:
        """The server's container."""
        return next(each for each in self.pod["containers"] if each["name"] == "server")

    @property
    def test_pod(self) -> Object:
        """The pod of `helm test`."""
        return next(each for each in self.all("Pod") if "helm.sh/hook" in each["metadata"]["annotations"])

    def sorted(self) -> list[Object]:
        """In an order that no version of Helm decides."""
        return sorted(self.objects, key=lambda each: (each["kind"], each["metadata"]["name"]))


# The parser in C, where PyYAML has it: by the other one reading takes longer than rendering.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def objects_of(text: str) -> list[Object]:
    """The objects of a stream of YAML documents."""
    return [each for each in yaml.load_all(text, Loader=_Loader) if each]


class Helm4:
    """Helm 4 by way of its library: a rendering takes milliseconds."""

    def __init__(self, chart: Path) -> None:
        self._library = pytest.importorskip(
            "helm_python", reason="helm-python-sdk is not installed (pip install '.[dev]'; Linux on x86-64 only)"
        )
        self.chart = chart
        self._loaded = self._library.Chart.load(str(chart))

    def render(self, values: dict[str, Any] | None = None) -> Rendered:
        """Raises Refused with Helm's own words."""
        files = self.files(values or {})
        notes = next((text for name, text in files.items() if name.endswith("NOTES.txt")), "")
        texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
        return Rendered([each for text in texts for each in objects_of(text)], notes)

    def files(self, values: dict[str, Any]) -> dict[str, str]:
        """Text by template. Raises Refused."""
        try:
            # A copy by way of JSON: the library takes what a values file can hold.
            copy = json.loads(json.dumps(values))
            return dict(self._loaded.render(copy, name=RELEASE, namespace=NAMESPACE))
        except self._library.HelmError as error:
            raise Refused(str(error)) from None


class Refused(Exception):
    """Helm did not render; the message is Helm's."""
