"""Bytes as people read them."""

from __future__ import annotations

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def shown(count: float) -> str:
    """`1.5 GB`: in the units in which disks and memory are sold."""
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
