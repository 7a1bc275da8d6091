"""The seed that a report prints is the one that its tests drew from."""

from __future__ import annotations

import os

from tests.conftest import SEED_ENV


def test_the_seed_of_a_worker_is_the_one_of_the_run(seed: int) -> None:
    """What a worker would draw for itself is in no report."""
    assert seed == int(os.environ[SEED_ENV])
