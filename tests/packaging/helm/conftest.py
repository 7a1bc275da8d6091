"""The chart, rendered by Helm 4."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.helm.chart import Helm4, copied
from tests.packaging.helm.dockerfile import Stage, stages
from tests.packaging.helm.image import build_wheel


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the chart with every file that it reads."""
    return copied(tmp_path_factory.mktemp("chart"))


@pytest.fixture(scope="session")
def helm4(chart: Path) -> Helm4:
    """Renders it."""
    return Helm4(chart)


@pytest.fixture(scope="session")
def image() -> Stage:
    """The last stage of the Dockerfile."""
    return stages()["image"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stage `wheel` of the Dockerfile builds."""
    return build_wheel(stages()["wheel"], tmp_path_factory.mktemp("wheel"))
