"""Bytes as people read them."""

from __future__ import annotations

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
ROUNDS_UP = 0.99995
"""Of a unit, the least that one decimal of it shows as 1.0: `1.0 MB`, and never `1000.0 kB`."""


def shown(count: float) -> str:
    """`1.5 GB`: in the units in which disks and memory are sold."""
    for size, unit in UNITS:
        if count >= size * ROUNDS_UP:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def shown_of(count: float, total: float) -> str:
    """`1.2 of 3.5 MB`: a part of `total`, in the unit of the whole."""
    for size, unit in UNITS:
        if total >= size * ROUNDS_UP:
            return f"{count / size:.1f} of {total / size:.1f} {unit}"
    return f"{count:.0f} of {total:.0f} bytes"
