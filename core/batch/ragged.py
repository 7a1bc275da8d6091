"""Runs of several entries, one after the other, in one array: tokens of rows, drafts, entries of biases."""

from __future__ import annotations

import numpy as np

from core.types.arrays import Ints


def starts_of(counts: Ints) -> Ints:
    """int64[n]: where each of n runs of `counts` entries, int64[n], begins."""
    starts: Ints = np.cumsum(counts) - counts
    return starts


def walk_runs(counts: Ints) -> tuple[Ints, Ints]:
    """(the run of each entry, its place in that run), int64[sum of counts] each."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) - starts_of(counts)[run]
