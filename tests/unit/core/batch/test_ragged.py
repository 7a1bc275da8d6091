"""Runs of several entries in one array."""

from __future__ import annotations

import numpy as np

from core.batch.ragged import starts_of, walk_runs


def test_each_entry_knows_its_run_and_its_place_there() -> None:
    run, place = walk_runs(np.array([2, 0, 3, 1]))
    assert run.tolist() == [0, 0, 2, 2, 2, 3]
    assert place.tolist() == [0, 1, 0, 1, 2, 0]
    assert starts_of(np.array([2, 0, 3, 1])).tolist() == [0, 2, 2, 5]


def test_no_runs_have_no_entries() -> None:
    run, place = walk_runs(np.array([], np.int64))
    assert len(run) == len(place) == len(starts_of(np.array([], np.int64))) == 0
