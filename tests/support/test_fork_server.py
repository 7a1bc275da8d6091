"""A forked program is a process like any other: streams, exit code, signals, and several threads that wait for it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.repository import ROOT

PATIENCE = 60.0
PROGRAM = "tests.support.echoing"


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """Without the imports of servers, which every test that starts one tries."""
    server = ForkServer(modules=("json",))
    yield server
    server.close()


def start(forks: ForkServer, *arguments: str, **environment: str) -> ForkedProcess:
    return forks.start(PROGRAM, arguments, os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def closed(process: ForkedProcess) -> str:
    """What it said on standard error; all streams are closed."""
    with process.stdin, process.stdout, process.stderr:
        return process.stderr.read()


def test_streams_environment_and_exit_code_are_its_own(forks: ForkServer) -> None:
    process = start(forks, "exit", "7", MINE="yes")
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline() == "hello yes\n"
    assert process.wait(PATIENCE) == 7 == process.poll()
    assert closed(process) == ""
    assert "MINE" not in os.environ


def test_all_that_wait_are_told(forks: ForkServer) -> None:
    process = start(forks, "exit", "3")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(process.wait, PATIENCE) for _ in range(4)]
        process.stdin.write("go\n")
        process.stdin.flush()
        assert [each.result() for each in waiting] == [3] * 4
    closed(process)


def test_signals_reach_it_and_one_that_comes_too_late_is_nothing(forks: ForkServer) -> None:
    process = start(forks, "sleep")
    assert process.stdout.readline() == "asleep\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == -signal.SIGTERM
    process.kill()
    closed(process)
    gone = start(forks, "exit", "0")
    with gone.stdin, gone.stdout, gone.stderr:
        gone.stdin.close()
        assert gone.wait(PATIENCE) == 0
        # As long as the news has not come.
        gone.returncode = None
        gone.kill()


def test_an_error_ends_it_as_it_ends_an_interpreter(forks: ForkServer) -> None:
    process = start(forks, "fail")
    assert process.wait(PATIENCE) == 1
    assert "ZeroDivisionError" in closed(process)


def test_what_was_read_before_the_fork_is_refused(forks: ForkServer) -> None:
    with pytest.raises(ValueError, match="start the program itself: LD_PRELOAD, PYTHONHASHSEED"):
        start(forks, LD_PRELOAD="/lib/shim.so", PYTHONHASHSEED="7")


def test_a_run_that_is_killed_leaves_no_server() -> None:
    script = (
        "import os, signal\nfrom tests.support.fork_server import ForkServer\n"
        "settings = os.environ | {'OMP_NUM_THREADS': '1'}\n"
        "forks = ForkServer(modules=['json'])\n"
        f"process = forks.start({PROGRAM!r}, ['sleep'], settings)\n"
        "print(process.pid, process.stdout.readline(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    pid = int(done.stdout.split()[0])
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], PATIENCE)[0], "it still runs"
    finally:
        os.close(handle)


def test_what_is_left_behind_before_it_can_be_told_so_ends_by_itself() -> None:
    """Under load a parent may be gone before its child has asked for the signal of its end."""
    code = "from tests.support.fork_server import end_with; end_with(%s); print('goes on')"
    for parent, said in (("__import__('os').getppid()", "goes on\n"), ("0", "")):
        done = subprocess.run(
            [sys.executable, "-c", code % parent], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.stdout == said, done.stderr
