"""Tests that workers share are each run once, and a worker that dies, hangs or is told to stop fails the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

CONFTEST = """
import os, time
import pytest

@pytest.fixture(scope="session")
def worker():
    yield os.getpid()
    note("down", os.getpid())

def note(*words):
    with open({notes!r}, "a") as file:
        print(*words, time.monotonic(), file=file)

@pytest.fixture(autouse=True)
def noted(request, worker):
    note("begins", worker, request.node.name)
    yield
    note("ends", worker, request.node.name)
"""
MANY = "@pytest.mark.parametrize('at', range(3))\ndef test_{name}(at): time.sleep(0.1)\n"


class Run:
    """A run of pytest over some files, each given as its text."""

    def __init__(self, folder: Path, *arguments: str, **files: str) -> None:
        self.notes = folder / "notes"
        (folder / "conftest.py").write_text(CONFTEST.format(notes=str(self.notes)))
        for name, text in files.items():
            (folder / f"test_{name}.py").write_text(f"import os, signal, time\nimport pytest\n\n{text}")
        plugins = ("-p", "tests.support.workers", "-p", "pytest_timeout", "-p", "no:cacheprovider")
        options = ("-c", os.devnull, "--rootdir", str(folder), "-o", "markers=alone: runs alone", *arguments)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plugins, *options, str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "500"},
        )
        self.code, self.out = done.returncode, done.stdout
        print(done.stdout, done.stderr)

    @property
    def counts(self) -> dict[str, int]:
        """Of the closing line."""
        return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", self.out.splitlines()[-1])}

    def noted(self, what: str) -> list[list[str]]:
        """The words of the notes of that kind."""
        lines = map(str.split, self.notes.read_text().splitlines())
        return [words[1:] for words in lines if words[0] == what]


def test_each_runs_once_its_file_in_one_worker_and_what_is_alone_last(tmp_path: Path) -> None:
    alone = "@pytest.mark.alone\ndef test_alone(): ...\n"
    files = {name: MANY.format(name=name) for name in "abcd"}
    run = Run(tmp_path, "--workers", "2", **files | {"a": alone + files["a"]})
    assert (run.code, run.counts["passed"]) == (0, 13)
    begun = run.noted("begins")
    assert sorted(name for _, name, _ in begun) == sorted(
        ["test_alone", *(f"test_{a}[{n}]" for a in "abcd" for n in range(3))]
    )
    workers = [{worker for worker, name, _ in begun if name.startswith(f"test_{file}[")} for file in "abcd"]
    assert [len(each) for each in workers] == [1] * 4 and len(set.union(*workers)) == 2
    assert begun[-1][1] == "test_alone" and float(begun[-1][2]) > max(float(at) for _, _, at in run.noted("ends")[:-1])
    # What a session has set up is taken down once by each worker, after its last test.
    assert len(run.noted("down")) == 3


def test_reports_are_those_of_one_process(tmp_path: Path) -> None:
    text = (
        "def test_fails(): print('said'); assert 1 == 2\n"
        "@pytest.fixture\ndef broken(): raise ValueError('gone')\n"
        "def test_error(broken): ...\n"
        "def test_skips(): pytest.skip('a reason')\n"
        "@pytest.mark.xfail\ndef test_known(): assert 0\n"
        "def test_prints(): print('unheard')\n"
    )
    for arguments in ((), ("--workers", "3")):
        run = Run(tmp_path, *arguments, "-ra", a=text)
        assert run.code == 1
        assert {
            word: run.counts[word] for word in ("passed", "failed", "skipped", "xfailed", "error")
        } == dict.fromkeys(("passed", "failed", "skipped", "xfailed", "error"), 1)
        for told in ("assert 1 == 2", "said\n", "ValueError: gone", "SKIPPED [1] ", "a reason"):
            assert told in run.out
        assert "unheard" not in run.out


def test_a_worker_that_dies_fails_its_test_and_the_others_run(tmp_path: Path) -> None:
    dies = "def test_before(): ...\ndef test_dies(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_after(): ...\n"
    run = Run(tmp_path, "--workers", "2", "-ra", a=dies, b=MANY.format(name="b"), c=dies)
    assert (run.code, run.counts["passed"], run.counts["failed"]) == (1, 7, 2)
    for file in "ac":
        assert f"test_{file}.py::test_dies - a worker ended with {-signal.SIGKILL} in the middle" in run.out


def test_what_a_worker_said_before_it_was_aborted_is_in_the_report(tmp_path: Path) -> None:
    aborts = (
        "def test_before(): os.write(2, b'earlier')\ndef test_aborts(): os.write(2, b'a check failed'); os.abort()\n"
    )
    run = Run(tmp_path, "--workers", "1", a=aborts)
    assert (run.code, run.counts["passed"], run.counts["failed"]) == (1, 1, 1)
    told = run.out[run.out.index("a worker ended with -6") :]
    assert "a check failed" in told and "in test_aborts" in told and "earlier" not in told


@pytest.mark.parametrize(
    "arguments", [("--timeout", "1"), ("--timeout", "1", "--timeout-method", "thread"), ("--workers-silence", "1")]
)
def test_one_that_hangs_fails_and_the_others_run(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    text = "def test_hangs(): time.sleep(600)\ndef test_after(): ...\n"
    run = Run(tmp_path, "--workers", "1", *arguments, a=text)
    assert (run.code, run.counts["passed"], run.counts["failed"]) == (1, 1, 1)


def test_it_stops_at_the_first_failure(tmp_path: Path) -> None:
    waits = "def test_waits(): time.sleep(600)\n"
    run = Run(tmp_path, "--workers", "2", "-x", a=waits, b="def test_fails(): assert 0\n" + MANY.format(name="b"))
    assert run.code == 1 and run.counts["failed"] == 1
    # The test that was interrupted has taken down what it had set up.
    assert "test_waits" in [name for _, name, _ in run.noted("ends")] and len(run.noted("begins")) < 5
    assert len(run.noted("down")) == 2


def test_nothing_to_run_and_nothing_to_collect_are_told(tmp_path: Path) -> None:
    assert (
        Run(tmp_path, "--workers", "2", "-k", "none", a=MANY.format(name="a")).code
        == pytest.ExitCode.NO_TESTS_COLLECTED
    )
    assert Run(tmp_path, "--workers", "2", b="import nothing_of_that_name\n").code == pytest.ExitCode.INTERRUPTED
