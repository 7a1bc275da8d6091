"""Signals of a machine that only computes: they reach it whatever its main thread waits in."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

PROGRAM = """
import logging, sys, threading
logging.basicConfig(level="INFO")
from service.cli.follower import Signals
signals = Signals()
signals.heed()
if sys.argv[1] == "joined":
    signals.joined.set()
print("heeds", flush=True)
held = threading.Lock()
held.acquire()
held.acquire()
"""


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM, request.param]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "heeds\n"
        yield process
        process.kill()


@pytest.mark.parametrize("started", ["alone"], indirect=True)
def test_before_ranks_have_met_the_first_one_ends_it(started: subprocess.Popen[str]) -> None:
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=20)
    assert started.returncode == 0 and "SIGTERM: no rank has met this one yet; exiting" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("started", ["joined"], indirect=True)
def test_after_that_the_second_one_does(started: subprocess.Popen[str], number: signal.Signals) -> None:
    started.send_signal(number)
    assert started.stderr is not None
    assert "this machine ends with rank 0; a second signal ends it at once" in started.stderr.readline()
    started.send_signal(signal.SIGTERM)
    assert started.wait(20) == 128 + signal.SIGTERM
