"""What a process may use is what its container may use, in both versions of control groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core import machine
from core.config import ExecutorConfig
from core.machine import free_memory, memory_share, usable_cpus
from core.memory.sizing import free_bytes

GIB = 1 << 30
Write = Callable[[str, dict[str, str]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files of a group, and what the process says of its groups as `OF`; the machine itself has much of both."""
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "OF_THIS_PROCESS", tmp_path / "of")
    monkeypatch.setattr(machine, "OF_THE_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_AVPHYS_PAGES": 1 << 28, "SC_PAGE_SIZE": 4096}[name])

    def write(group: str, files: dict[str, str]) -> None:
        directory = tmp_path / "groups" / group
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / "of" if name == "OF" else directory / name).write_text(text + "\n")

    return write


def test_without_a_container_it_is_the_machine(write: Write) -> None:
    assert (usable_cpus(), free_memory()) == (96, 1 << 40)
    assert ExecutorConfig().threads() == 95
    assert ExecutorConfig(cpu_threads=3).threads() == 3


@pytest.mark.parametrize("path", ["/", "/pod/container"])
def test_limits_of_version_2(write: Write, path: str) -> None:
    """The container's own group may be mounted as the root, or stand below it."""
    stat = "anon 7\nactive_file 5\ninactive_file 1073741824"
    limits = {"memory.max": str(4 * GIB), "memory.current": str(2 * GIB), "memory.stat": stat}
    write(path.strip("/"), {"OF": f"0::{path}", "cpu.max": "150000 100000"} | limits)
    assert usable_cpus() == 2
    assert free_memory() == 3 * GIB
    assert free_bytes(torch.device("cpu")) == 3 * GIB // 4
    assert ExecutorConfig().threads() == 1


def test_limits_of_version_1(write: Write) -> None:
    write("", {"OF": "4:memory:/pod\n3:cpu,cpuacct:/pod\n1:name=systemd:/init"})
    write("cpu/pod", {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"})
    write("memory/pod", {"memory.limit_in_bytes": str(GIB), "memory.usage_in_bytes": str(GIB // 4)})
    assert (usable_cpus(), free_memory()) == (4, GIB * 3 // 4)


def test_the_group_around_is_a_limit_too_and_no_bound_is_none(write: Write) -> None:
    write("", {"OF": "0::/pod/container"})
    write("pod", {"cpu.max": "800000 100000", "memory.max": str(2 * GIB), "memory.current": str(3 * GIB)})
    write("pod/container", {"cpu.max": "max 100000", "memory.max": "max", "memory.current": str(GIB)})
    assert (usable_cpus(), free_memory()) == (8, 0)


def test_affinity_is_a_limit(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert usable_cpus() == 2


def test_files_that_say_nothing_bound_nothing(write: Write) -> None:
    write("", {"OF": "0::/gone", "cpu.max": "none", "memory.max": "much", "memory.stat": "x"})
    assert (usable_cpus(), free_memory()) == (96, 1 << 40)


def test_memory_in_use_is_that_of_the_nearest_limit(write: Write, tmp_path: Path) -> None:
    assert memory_share() == 0, "nothing says"
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n")
    assert memory_share() == pytest.approx(0.6), "what the kernel can give up is not in use"
    stat = f"inactive_file {GIB}"
    write("pod", {"memory.max": str(4 * GIB), "memory.current": str(4 * GIB), "memory.stat": stat})
    write("pod/container", {"OF": "0::/pod/container", "memory.max": "max", "memory.current": str(3 * GIB)})
    assert memory_share() == pytest.approx(0.75), "of the group around it, without its file cache"
    write("memory/pod", {"memory.limit_in_bytes": str(GIB), "memory.usage_in_bytes": str(GIB // 10 * 9)})
    write("", {"OF": "4:memory:/pod\n1:name=systemd:/"})
    assert memory_share() == pytest.approx(0.9)
