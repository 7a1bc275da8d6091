"""What this process may use of the machine, by the limits of its container, which `os` does not report.

A pod of 2 cores and 4 GiB may run on a node of 96 cores and 1 TiB. Sized by the node, it would have too many threads,
and would be killed when its pools fill. Linux keeps the limits as files of control groups, of version 2 (`memory.max`,
`cpu.max`) or 1. The limits of every enclosing group hold too.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
OF_THIS_PROCESS = Path("/proc/self/cgroup")
OF_THE_MACHINE = Path("/proc/meminfo")
KIB = 1024
"""Bytes of the unit of that file."""

MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""By version: file of the limit, file of the use, and the line of `memory.stat` with memory the kernel can reclaim."""


def usable_cpus() -> int:
    """Cores that this process may keep busy, at least 1: the smallest of affinity and quotas, rounded up."""
    found = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    for group in _groups("cpu"):
        quota = _quota(group)
        if quota is not None:
            found = min(found, quota)
    return max(1, math.ceil(found))


def free_memory() -> int:
    """Bytes that can still be allocated before the machine, or a limit of its control groups, is full."""
    return _within_groups(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def available_memory() -> int:
    """Bytes as `free_memory` counts them, and those of the machine that the kernel can reclaim, of cached files say."""
    known = _line_of(OF_THE_MACHINE, "MemAvailable:") * KIB
    return _within_groups(known) if known else free_memory()


def _within_groups(found: float) -> int:
    """The least of `found` and what each limit leaves, in bytes, at least 0."""
    for group in _groups("memory"):
        for limit_file, used_file, given_up in MEMORY_FILES:
            limit, used = _number(group / limit_file), _number(group / used_file)
            if limit is not None and used is not None:
                found = min(found, limit - used + _line_of(group / "memory.stat", given_up))
    return max(0, int(found))


def memory_share() -> float:
    """Share of memory in use, 0 to 1: of the machine, or of the control group limit that is nearest to being reached.

    Memory that the kernel can reclaim is not in use. 0 where neither can be read.
    """
    found = 0.0
    free, total = (_line_of(OF_THE_MACHINE, name) for name in ("MemAvailable:", "MemTotal:"))
    if total:
        found = 1 - free / total
    for group in _groups("memory"):
        for limit_file, used_file, given_up in MEMORY_FILES:
            limit, used = _number(group / limit_file), _number(group / used_file)
            if limit and used is not None:
                found = max(found, (used - _line_of(group / "memory.stat", given_up)) / limit)
    return max(0.0, found)


def give_back_memory() -> None:
    """Make the C allocator return freed memory to the system, where it has `malloc_trim`. Takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _groups(controller: str) -> Iterator[Path]:
    """Directories of this process's control group under `controller`, and of all groups that enclose it."""
    try:
        lines = OF_THIS_PROCESS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        root = GROUPS if number == "0" else GROUPS / controller
        inside = PurePosixPath(path.lstrip("/"))
        # Inside a container its own group may be mounted as the root, below which the path leads nowhere.
        yield from (each for part in (inside, *inside.parents) if (each := root / part).is_dir())


def _quota(group: Path) -> float | None:
    """The CPU quota of `group` in cores; None without a quota."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        found, of = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        return found / of if found is not None and of and found > 0 else None
    return None if quota == "max" else int(quota) / int(period)


def _number(file: Path) -> int | None:
    """The number in `file`; None where it holds none, `max` for instance, or cannot be read."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _line_of(file: Path, name: str) -> int:
    try:
        lines = (line.split() for line in file.read_text().splitlines())
        return next((int(value) for key, value, *_unit in lines if key == name), 0)
    except (OSError, ValueError):
        return 0
