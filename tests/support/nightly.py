"""Which tests `make test` leaves to `make nightly`: those of `nightly.txt`, each slow and named by no mutant.

A test that a mutant names is what kills it, so it is never left out (`tests/tidy/test_nightly.py`). Of a matrix some
cases stay, and a new case stays until it is listed. `make test ARGS=--durations=0` says what takes how long.
"""

from __future__ import annotations

import os

from tests.support.repository import ROOT

FILE = ROOT / "tests" / "nightly.txt"


def listed(text: str) -> frozenset[str]:
    """The node ids of such a file: a line each, but for empty ones and comments."""
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


NIGHTLY = listed(FILE.read_text())


def runs(few: int, many: int) -> int:
    """How often a random test repeats itself: `many` times in `make nightly` and `make scorecard`."""
    return many if os.environ.get("AT_LENGTH") else few
