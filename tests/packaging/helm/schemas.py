"""Kubernetes' own schemas, strict ones, as `kubernetes-validate --strict` applies them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.packaging.helm import worker_sets
from tests.packaging.helm.chart import Object

VERSIONS = tuple(f"1.{minor}" for minor in range(28, 38))
CUSTOM = frozenset({"ServiceMonitor", "PrometheusRule", "ScaledObject"})
"""Kinds of which Kubernetes knows nothing."""


def _pods_apart(objects: list[Object]) -> Iterator[Object]:
    """`objects`; of a LeaderWorkerSet its pods."""
    for each in objects:
        yield from worker_sets.templates(each) if each["kind"] == worker_sets.KIND else (each,)


class Schemas:
    """Of every version; each file is read once."""

    def __init__(self) -> None:
        self._tool: Any = pytest.importorskip(
            "kubernetes_validate", reason="kubernetes-validate is not installed (pip install '.[dev]')"
        )
        # Every look at an object would otherwise read a megabyte of JSON again.
        utils = self._tool.utils
        utils.schema_contents = functools.cache(utils.schema_contents)
        self._seen: dict[tuple[str, str], list[str]] = {}

    def findings(self, objects: list[Object], version: str) -> list[str]:
        """What this version has against them. An object that was looked at before is not looked at again."""
        found: list[str] = []
        for each in _pods_apart(objects):
            if each["kind"] not in CUSTOM:
                key = (version, json.dumps(each, sort_keys=True))
                if key not in self._seen:
                    self._seen[key] = self._look(each, version)
                found += self._seen[key]
        return found

    def _look(self, each: Object, version: str) -> list[str]:
        try:
            used = self._tool.validate(each, version, strict=True)
        except (self._tool.ValidationError, self._tool.SchemaNotFoundError) as error:
            return [f"{each['kind']} {each['metadata']['name']}: {error.message}"]
        assert used == version, f"{used} stood in for {version}"
        return []
