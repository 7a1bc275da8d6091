"""Ranks of several machines know each other by a secret, and listen where the others are."""

from __future__ import annotations

import multiprocessing
import socket
from typing import Any

import pytest
import torch

from core.distributed import meeting
from core.distributed.meeting import HOST, INTERFACE, Meeting, interface_of
from core.distributed.world import World
from core.errors import ConfigError, StartupError

CPU = torch.device("cpu")
OURS, OTHER = b"a secret of ours", b"a secret of others"


def _rank(port: int, secrets: tuple[bytes, bytes], told: Any) -> None:
    """Rank 1, with the second secret, which says how it went; another group too."""
    try:
        world = World.join(1, 2, Meeting(port, secret=secrets[1], seconds=20.0), CPU)
        world.group()
        told.send(world.called(0))
        told.recv()
        world.leave()
    except StartupError as error:
        told.send(str(error))


def met(ours: bytes, theirs: bytes) -> tuple[str, str]:
    """What rank 0 and rank 1 say of each other."""
    listener = socket.create_server((HOST, 0))
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    port = listener.getsockname()[1]
    process = spawning.Process(target=_rank, args=(port, (ours, theirs), there), daemon=True)
    process.start()
    try:
        world = World.join(0, 2, Meeting(port, listener, secret=ours, seconds=20.0), CPU)
        world.group()
        said = world.called(1)
        assert here.poll(20)
        answer = here.recv()
        here.send("end")
        world.leave()
        return said, answer
    except StartupError as error:
        assert here.poll(20)
        return str(error), here.recv()
    finally:
        process.join(10)
        process.kill()


def test_ranks_with_one_secret_are_ranks() -> None:
    assert met(OURS, OURS) == (f"rank 1 at {HOST}", f"rank 0 at {HOST}")


def test_a_rank_with_another_secret_is_none() -> None:
    """Both say so: which of them is the stranger is not for them to say."""
    here, there = met(OURS, OTHER)
    assert here == "rank 1 has another rank_secret_file than rank 0, or is none of ours"
    assert "rank 0 has another rank_secret_file than rank 1" in there or "Connection closed" in there


def test_a_proof_is_of_one_direction_and_of_one_meeting() -> None:
    """What one rank says cannot be said back to it, nor again."""
    ours = Meeting(1, secret=OURS)
    drawn = b"asked", b"drawn"
    said = ours._proof(0, 1, *drawn)
    assert said not in (ours._proof(1, 0, *drawn), ours._proof(0, 2, *drawn), ours._proof(0, 1, b"anew", b"drawn"))
    assert said not in (ours._proof(0, 1, b"asked", b"anew"), Meeting(1, secret=OTHER)._proof(0, 1, *drawn))


def test_where_nothing_listens_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    said = rf"rank 1 of 2 did not meet the others at 127.0.0.1:{port} within 0 s: nothing answers there \(Conn"
    with pytest.raises(StartupError, match=said):
        World.join(1, 2, Meeting(port, seconds=0.2), CPU)
    assert capfd.readouterr() == ("", ""), "and nothing that a library has to say of it"


def test_gloo_listens_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "mine0")
    monkeypatch.setattr(meeting, "interface_of", lambda address: f"that of {address}")
    elsewhere = Meeting(1, host="127.0.0.2")
    assert elsewhere.listen_inside() == "127.0.0.1" and meeting.os.environ.get(INTERFACE) == "mine0"
    monkeypatch.delenv(INTERFACE)
    elsewhere.listen_inside()
    assert meeting.os.environ.get(INTERFACE) == "that of 127.0.0.1"
    assert Meeting(1).listen_inside() == HOST and meeting.os.environ.get(INTERFACE) == "lo", "whatever was set"


def test_a_host_without_a_way_to_it_is_named() -> None:
    with pytest.raises(StartupError, match=r"master_addr 255\.255\.255\.255: "):
        Meeting(1, host="255.255.255.255").listen_inside()


def test_interfaces_are_found_by_their_addresses() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=f"no interface is known to have 192.0.2.1: name it in {INTERFACE}"):
        interface_of("192.0.2.1")
