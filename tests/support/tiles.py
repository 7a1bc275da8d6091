"""Whether the processor multiplies bfloat16 in tiles (AMX), which add otherwise than vectors do (decision 57)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILE = Path("/proc/cpuinfo")


def has_tiles() -> bool:
    """Whether compiled code adds sums of many rows otherwise than those of few, unless it is told not to."""
    return FILE.is_file() and "amx_bf16" in FILE.read_text()


def same_bits(dtype: str) -> dict[str, Any]:
    """Settings of a model in which a row has the same bits whatever is beside it."""
    return {"deterministic": True} if dtype == "bfloat16" and has_tiles() else {}
