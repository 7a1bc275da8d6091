"""Ranks hear what the leader says, whatever its length, and a rank that stays away is told of in one line."""

from __future__ import annotations

import multiprocessing
import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.distributed.meeting import HOST, INTERFACE, Meeting
from core.distributed.world import FIRST, World
from core.errors import StartupError

CPU = torch.device("cpu")
LENGTHS = (0, 1, FIRST - 9, FIRST - 8, FIRST - 7, 3 * FIRST + 5)


def _echo(port: int, answers: Any) -> None:
    """A follower that says what it heard, and what the leader made of its numbers."""
    found = World.join(1, 2, Meeting(port), CPU)
    heard = [bytes(found.receive()) for _ in LENGTHS]
    shared = torch.zeros(3, dtype=torch.int64)
    found.share(shared)
    answers.send((heard, shared.tolist()))
    found.leave()


def test_messages_of_any_length_arrive_whole() -> None:
    listener = socket.create_server((HOST, 0))
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_echo, args=(listener.getsockname()[1], theirs), daemon=True)
    process.start()
    leader = World.join(0, 2, Meeting(listener.getsockname()[1], listener), CPU)
    try:
        said = [bytes(number % 251 for number in range(length)) for length in LENGTHS]
        for each in said:
            leader.send(each)
        leader.share(torch.tensor([4, 5, 6]))
        assert ours.poll(20), "the follower heard all of it"
        assert ours.recv() == (said, [4, 5, 6])
    finally:
        process.kill()
        process.join()
        leader.leave()
    leader.leave()


def test_a_rank_that_stays_away_is_told_of_in_one_line() -> None:
    listener = socket.create_server((HOST, 0))
    said = r"^rank 0 of 3 did not meet the others at 127.0.0.1:\d+ within 1 s: no word of rank 1, 2$"
    with pytest.raises(StartupError, match=said):
        World.join(0, 3, Meeting(listener.getsockname()[1], listener, seconds=1.0), CPU)


def test_the_environment_is_that_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on another network, or a process that is started later, would listen where this one did."""
    for before in ("mine0", None):
        monkeypatch.setenv(INTERFACE, before) if before else monkeypatch.delenv(INTERFACE)
        listener = socket.create_server((HOST, 0))
        alone = World.join(0, 1, Meeting(listener.getsockname()[1], listener), CPU)
        assert os.environ.get(INTERFACE) == "lo"
        alone.leave()
        assert os.environ.get(INTERFACE) == before
        with pytest.raises(StartupError, match="did not meet"):
            World.join(0, 2, Meeting(1, socket.create_server((HOST, 0)), seconds=0.01), CPU)
        assert os.environ.get(INTERFACE) == before


def test_nothing_is_waited_for_that_cannot_come() -> None:
    def check() -> None:
        raise StartupError("rank 1 has ended")

    listener = socket.create_server((HOST, 0))
    with pytest.raises(StartupError, match="rank 1 has ended"):
        World.join(0, 2, Meeting(listener.getsockname()[1], listener, seconds=0.5), CPU, check)


def test_a_process_is_a_rank_once_and_waits_for_news_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, given = socket.create_server((HOST, 0)), list[timedelta]()
    begin = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: given.append(k["timeout"]) or begin(*a, **k))
    alone = World.join(0, 1, Meeting(listener.getsockname()[1], listener), CPU)
    try:
        assert given[0] >= timedelta(days=30), "gloo's half an hour would end an idle rank"
        with pytest.raises(StartupError, match="a rank of one engine at a time"):
            World.join(0, 1, Meeting(1), CPU)
    finally:
        alone.leave()
