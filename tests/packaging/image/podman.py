"""Podman, as far as the tests of the image need it: settings that work in most places, and commands with a bound."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 120.0
"""Seconds after which a command counts as hanging; a drain has its own."""

ENOUGH = 16384
"""Files and processes of a container; a worker has a hundred threads."""


class Podman:
    """The program, told of settings in `folder`, with the network of this machine: a bridge needs more rights."""

    def __init__(self, folder: Path) -> None:
        # A container that meets its memory limit leaves a file in the directory from which podman was called.
        self._folder = folder
        own = folder / "containers.conf"
        own.write_text(_settings())
        self._env = os.environ | {"CONTAINERS_CONF": str(own)}

    def run(self, *arguments: str, within: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """One command; what it answered, whatever that is."""
        command, where = ["podman", *arguments], self._folder
        return subprocess.run(
            command, cwd=where, env=self._env, capture_output=True, text=True, timeout=within, check=False
        )

    def ok(self, *arguments: str, within: float = PATIENCE) -> str:
        """Standard output of a command that has to succeed."""
        done = self.run(*arguments, within=within)
        assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        """What podman knows of a container or image."""
        (found,) = json.loads(self.ok(kind, "inspect", name))
        return dict(found)


def _settings() -> str:
    """Limits of files and processes below this process's own: a container that may not raise them would not start."""
    limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    told = [f'"{name}={_hard(number)}:{_hard(number)}"' for name, number in limits.items()]
    # crun refuses a machine whose control groups are of both versions.
    runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
    return (
        f'[containers]\nnetns = "host"\ndefault_ulimits = [{", ".join(told)}]\n'
        f'[engine]\n{runtime}cgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )


def _hard(number: int) -> int:
    hard = resource.getrlimit(number)[1]
    return ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)


def needs_podman(podman: Podman, image: str) -> None:
    """Skip where this user cannot run the image: no podman, no root, no control groups. Fail where it was not built."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed (apt-get install podman runc catatonit)")
    if os.geteuid() != 0:
        pytest.skip("needs root: memory limits and users of a container")
    if podman.run("image", "exists", image).returncode != 0:
        pytest.fail(f"podman has no {image}: make image builds it; docker save {image} | podman load brings it")
    tried = podman.run("run", "--rm", "--memory=512m", image, "--version")
    if tried.returncode != 0:
        pytest.skip(f"podman cannot run a container here: {(tried.stderr.strip().splitlines() or ['?'])[-1]}")
