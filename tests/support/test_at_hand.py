"""`make gpu VENV=` gets along with what a machine with a GPU has: no fixture, test or benchmark of it imports more."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import at_hand, stand_ins
from tests.support.at_hand import NEEDS, SERVERS, missing, plugins
from tests.support.repository import ROOT

AT_HAND = {"torch", "jinja2", "transformers", "tokenizers", "safetensors", "numpy", "click"} | {
    *("pytest", "_pytest", "packaging"),
}
"""What comes with PyTorch, transformers and pytest."""
HOUSES = ("core", "service", "tests")
FOLDERS = ("tests/gpu", "tests/unit/core/attention")
FILES = (
    *("tests/unit/core/relay/test_fused_relay.py", "tests/unit/core/sampling/test_gpu.py"),
    *("tests/unit/core/sampling/test_triton_sampling.py", "tests/unit/core/models/test_fused.py"),
    *("tests/unit/core/models/lora/test_row_deltas.py", "service/bench/gpu.py"),
)
IMPORT = re.compile(r"^(?:from ([\w.]+) import (\([^)]*\)|.*)|import (.*))$", re.MULTILINE)
"""At the left margin: one in a function, or for type checkers, is not carried out."""
REFUSED = (
    *SERVERS,
    "google",
    "hypothesis",
    "pytest_asyncio",
    "pytest_timeout",
    "llguidance",
    "torchao",
    "psutil",
    "peft",
)

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def planned(target: str, *settings: str) -> str:
    """What `make` would run, in one text."""
    command = ("make", "-n", "--no-print-directory", target, *settings)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


@needs_make
def test_without_an_environment_the_interpreter_at_hand_runs_all_parts_and_nothing_is_installed() -> None:
    plan = planned("gpu", "VENV=", "PYTHON=/at/hand/python", "ARGS=--steps 7")
    assert ".venv" not in plan and "pip" not in plan and "-m venv" not in plan
    tests, own, mixed, peer = (line for line in plan.splitlines() if "/at/hand/python -m" in line)
    assert all(path in tests for path in (*FOLDERS, *FILES[:-1])) and "--steps" not in tests
    for part, line in (("own", own), ("mixed", mixed), ("peer", peer)):
        name = {"own": "bench"}.get(part, part)
        assert f"service bench gpu --part {part} --out build/gpu-{name}.json --steps 7" in line
    # No part may take eight minutes.
    for line in (tests, own, mixed, peer):
        before, _, after = line.partition(" --kill-after ")
        assert before.endswith("timeout --foreground --signal INT")
        assert sum(map(int, after.split()[:2])) < 480


def imported(text: str) -> Iterator[str]:
    """Dotted names that a module imports when it is loaded, and those that may be names in a module."""
    for module, names, modules in IMPORT.findall(text):
        yield from re.findall(r"[\w.]+", module or re.sub(r" as \w+", "", modules))
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def beyond(starts: list[str], allowed: set[str]) -> dict[str, str]:
    """Packages that are not `allowed` and that these modules, or modules that they import, import; and by which."""
    seen, found, left = set(starts), {}, list(starts)
    while left:
        module = left.pop()
        if (path := file_of(module)) is None:
            continue
        parents = [module.rsplit(".", up)[0] for up in range(1, module.count(".") + 1)]
        for name in (*imported(path.read_text()), *parents):
            if (root := name.partition(".")[0]) in HOUSES:
                left += {name} - seen
                seen.add(name)
            elif root not in allowed | sys.stdlib_module_names:
                found.setdefault(root, module)
    return found


def modules() -> list[str]:
    """All that is loaded for these tests and the benchmark: their files, those that pytest loads first, and plugins."""
    files = [*FILES, "tests/conftest.py", *(str(each) for folder in FOLDERS for each in (ROOT / folder).glob("*.py"))]
    names = [str((ROOT / each).relative_to(ROOT)).removesuffix(".py").replace("/", ".") for each in files]
    beside = [f"{name.rpartition('.')[0]}.conftest" for name in names]
    standing = ["tests.support.stand_ins", "tests.support.log_lines", "tests.support.workers"]
    return [*names, *beside, *standing, "service.__main__", "service.cli.cli", "service.bench"]


def test_nothing_that_is_loaded_imports_what_is_not_at_hand() -> None:
    assert beyond(modules(), AT_HAND) == {}


def test_the_rule_can_fail() -> None:
    assert beyond(["tests.support.random_examples"], AT_HAND) == {"hypothesis": "tests.support.random_examples"}
    assert {"grpc", "prometheus_client"} <= beyond(["tests.support.scripted"], AT_HAND).keys()


def test_plugins_are_left_out_with_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugins() == list(NEEDS), "here everything is at hand"
    assert missing("torch", "no_such_package") == ["no_such_package"]
    monkeypatch.setattr(at_hand, "find_spec", lambda name: None if name == "grpc_status" else object())
    assert plugins() == ["tests.support.random_examples"]


def test_stand_ins_do_nothing_where_the_plugins_are(pytestconfig: pytest.Config) -> None:
    assert stand_ins.pytest_report_header() is None
    assert not any(isinstance(each, stand_ins.CoroutineRunner) for each in pytestconfig.pluginmanager.get_plugins())


def test_a_coroutine_is_run_once_with_its_fixtures(pytestconfig: pytest.Config) -> None:
    given: list[int] = []

    async def waits(fixture: int) -> None:
        await asyncio.sleep(0)
        given.append(fixture)

    def plain(fixture: int) -> None:
        given.append(-fixture)

    found = []
    for test in (waits, plain):
        item: Any = SimpleNamespace(obj=test, funcargs={"fixture": 7, "another": 8})
        found.append(stand_ins.CoroutineRunner().pytest_pyfunc_call(item))
    # What is not None tells pytest that the test was run.
    assert found == [True, None] and given == [7]


HIDING = f"""
import functools, runpy, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hidden = {REFUSED!r}
def known(name, *rest):
    return None if name.partition(".")[0] in hidden else find(name, *rest)
PathFinder.find_spec = functools.partial(known)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_it_runs_where_the_packages_are_missing(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", HIDING, *arguments]
        # Plugins that are installed would be loaded by their entry points.
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)

    tests = [*FOLDERS, *FILES[:-1]]
    collected = run("pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    ran = run("pytest", "-p", "no:cacheprovider", "tests/gpu", "tests/unit/core/attention/test_span.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "not at hand: grpc, grpc_health" in ran.stdout and " passed" in ran.stdout
    shape = ["--device", "cpu", "--shape", "tiny", "--batches", "1", "--contexts", "16", "--steps", "6"]
    for part in ("own", "mixed", "peer"):
        measured = run("service", "bench", "gpu", "--part", part, *shape, "--out", str(tmp_path / part))
        assert measured.returncode == 0, measured.stderr
    if not torch.cuda.is_available():
        assert "CUDA" in run("service", "bench", "gpu").stderr
