"""The chart, rendered by Helm 4."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm.chart import Helm4, copied


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the chart with every file that it reads."""
    return copied(tmp_path_factory.mktemp("chart"))


@pytest.fixture(scope="session")
def helm4(chart: Path) -> Helm4:
    """Renders it."""
    return Helm4(chart)
