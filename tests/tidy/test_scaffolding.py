"""The files around the code: they parse, agree with each other, and do what a newcomer is told."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib

import pytest
import torch

from tests.support.repository import ROOT
from tests.tidy.source import Source, texts

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = (
    *("help", "venv", "serve", "test", "soak", "scorecard", "check", "sim", "sim-long", "mutants", "demo", "bench"),
    *("chart", "format", "proto", "nightly", "test-lowest", "gpu", "gpu-tests", "gpu-bench", "gpu-mixed", "gpu-peer"),
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_help_is_the_default_and_lists_every_target() -> None:
    shown = run("make", "--no-print-directory")
    assert shown.returncode == 0, shown.stderr
    for target in TARGETS:
        assert re.search(rf"^\s*{target}\s+\S", shown.stdout, re.MULTILINE), f"{target} is not in:\n{shown.stdout}"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_be_planned(target: str) -> None:
    """`make -n` expands each recipe without running it."""
    planned = run("make", "-n", target)
    assert planned.returncode == 0, planned.stderr


def test_the_ci_script_is_executable_bash_that_stops_at_errors() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert run("bash", "-n", str(script)).returncode == 0
    text = script.read_text()
    assert "set -euo pipefail" in text
    for step in ("make check", "make test", "make mutants"):
        assert re.search(rf"^ *{step}\b", text, re.MULTILINE), step


def test_the_licence_is_the_whole_of_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License")
    assert "END OF TERMS AND CONDITIONS" in text and len(text.split()) > 1500
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_what_is_imported_is_declared() -> None:
    declared = {re.split(r"[<>=\[]", each)[0] for each in PROJECT["project"]["dependencies"]}
    for name in (
        "torch",
        "transformers",
        "grpcio",
        "prometheus-client",
        "asyncio-throttle",
        "safetensors",
        "tokenizers",
    ):
        assert name in declared
    assert PROJECT["project"]["scripts"] == {"slipstream": "service.cli.cli:main"}


def test_generated_code_is_current() -> None:
    if not (ROOT / "service" / "pb" / "generate.py").exists():
        pytest.skip("service/pb/generate.py is not written yet")
    pytest.importorskip("grpc_tools")
    checked = run(sys.executable, "-m", "service.pb.generate", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_texts_include_what_people_write_and_leave_out_what_tools_write() -> None:
    paths = {source.path for source in texts()}
    assert {"Makefile", "pyproject.toml", "core/invariants.py", ".ci/run"} <= paths
    assert not any(path.startswith("service/pb/slipstream/") or path.endswith("LICENSE") for path in paths)


def test_module_names_are_those_of_the_import_system() -> None:
    assert Source("core/memory/rows.py", "").module == "core.memory.rows"
    assert Source("core/memory/__init__.py", "").module == "core.memory"


def test_tests_run_on_one_thread_with_a_seed_and_without_a_network(seed: int) -> None:
    assert torch.get_num_threads() == 1
    assert seed >= 0
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ConnectionRefusedError, match="may not reach"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(ConnectionRefusedError, match="may not reach"):
        socket.getaddrinfo("example.org", 80)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
