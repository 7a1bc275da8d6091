"""One checkpoint of each kind for the whole session; a test that changes files makes its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.fakes.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint(kind) -> directory, read-only."""

    @cache
    def make(kind: str) -> Path:
        return make_checkpoint(kind, tmp_path_factory.mktemp(kind))

    return make
