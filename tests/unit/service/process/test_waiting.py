"""Torch's threads sleep between operations in our processes, and wait as they like in those of peers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.bench.contenders import environment_of
from service.process.child import environment
from service.process.waiting import POLICY, environment_of_others, have_threads_sleep


@pytest.fixture(autouse=True)
def _given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test says what the operator has set; all that is set in it is gone afterwards."""
    kept = {name: value for name, value in os.environ.items() if POLICY not in name}
    monkeypatch.setattr(os, "environ", kept)


def _turns_of_a_command(given: dict[str, str]) -> int:
    """How often threads of torch look before they sleep, as its OpenMP library says in a command that imports it."""
    command = [sys.executable, "-m", "service", "bench", "encoders", "--help"]
    ran = subprocess.run(command, env=environment() | given, capture_output=True, text=True, check=True)
    return next(int(line.split("'")[1]) for line in ran.stderr.splitlines() if "GOMP_SPINCOUNT" in line)


def test_they_sleep_in_a_command_unless_the_operator_has_them_spin() -> None:
    shown = {"OMP_DISPLAY_ENV": "VERBOSE"}
    assert _turns_of_a_command(shown) == 0
    assert _turns_of_a_command(shown | {POLICY: "active"}) > 1_000_000


def test_processes_of_ours_inherit_it_and_those_of_peers_do_not() -> None:
    before = dict(os.environ)
    have_threads_sleep()
    assert os.environ[POLICY] == "passive" and environment()[POLICY] == "passive"
    assert environment_of_others() == before
    assert environment_of("slipstream", Path("/here"), 3)[POLICY] == "passive"
    peers = environment_of("transformers", Path("/here"), 3)
    assert peers == before | {"PYTHONPATH": "/here", "OMP_NUM_THREADS": "3"}


def test_what_the_operator_has_set_peers_get_too() -> None:
    os.environ[POLICY] = "passive"
    have_threads_sleep()
    assert environment_of_others()[POLICY] == "passive"


def test_a_process_that_this_one_started_knows_whose_it_is() -> None:
    """A benchmark of a benchmark's process starts peers as well: it finds the policy set, and not by an operator."""
    have_threads_sleep()
    have_threads_sleep()
    assert POLICY not in environment_of_others()
