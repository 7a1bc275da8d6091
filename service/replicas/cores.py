"""Which cores of the machine each engine gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from core.machine import usable_cpus

CPUS: Final = Path("/sys/devices/system/cpu")
Core = tuple[int, int]
"""Socket and core of a processor: processors of one core share its units."""


def cores_of(cpus: Sequence[int], folder: Path = CPUS) -> dict[int, Core]:
    """Where each of `cpus` is. One that the system says nothing of is a core of its own."""
    return {cpu: _core(folder / f"cpu{cpu}" / "topology", cpu) for cpu in cpus}


def _core(folder: Path, cpu: int) -> Core:
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return -1, cpu


def shared_out(cores: Mapping[int, Core], count: int) -> list[tuple[int, ...]]:
    """`count` groups of processors, of equal numbers of cores, neighbours together; none where cores are too few.

    Processors of one core stay together: engines that shared one would halve each other. Cores of one socket stay
    together as far as the numbers allow, since memory of another one is far.
    """
    by_core: dict[Core, list[int]] = {}
    for cpu, core in sorted(cores.items(), key=lambda each: (each[1], each[0])):
        by_core.setdefault(core, []).append(cpu)
    groups, each = list(by_core.values()), len(by_core) // count
    if not each:
        return []
    return [tuple(cpu for group in groups[at * each : (at + 1) * each] for cpu in group) for at in range(count)]


def own_cores(count: int) -> list[tuple[int, ...]]:
    """The cores of each of `count` engines; none where they cannot have their own.

    A quota of processor time, as a container has, names no cores: others may be bound to those that were picked.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cpus = sorted(os.sched_getaffinity(0))
    return shared_out(cores_of(cpus), count) if usable_cpus() == len(cpus) else []


def threads_of_each(count: int) -> int:
    """Math threads for each of `count` engines that share the cores: theirs, but for one for its event loop."""
    return max(1, usable_cpus() // count - 1)
