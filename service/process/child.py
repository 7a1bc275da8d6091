"""Processes that this one starts: what they import, and that they do not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1


def environment() -> dict[str, str]:
    """The environment of a process that imports this very package, and else what this one can import."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, even if it is stopped then and hears of nothing."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
