"""Ranks of several machines know each other by a secret, and listen where the others are."""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.distributed import meeting, world
from core.distributed.meeting import HOST, INTERFACE, Meeting, interface_of
from core.distributed.pulse import Pulse
from core.distributed.world import World
from core.errors import ConfigError, StartupError

CPU = torch.device("cpu")
OURS, OTHER = b"a secret of ours", b"a secret of others"


def _rank(port: int, secrets: tuple[bytes, bytes], told: Any) -> None:
    """Rank 1, with the second secret, which says how it went; another group too."""
    try:
        joined = World.join(1, 2, Meeting(port, secret=secrets[1], seconds=20.0), CPU)
        joined.group()
        told.send(joined.called(0))
        told.recv()
        joined.leave()
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
        joined = World.join(0, 2, Meeting(port, listener, secret=ours, seconds=20.0), CPU)
        joined.group()
        said = joined.called(1)
        assert here.poll(20)
        answer = here.recv()
        here.send("end")
        joined.leave()
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


def test_what_answers_and_is_no_rank_0_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((HOST, 0)) as mute, pytest.raises(StartupError, match="what answers there is no rank 0"):
        World.join(1, 2, Meeting(mute.getsockname()[1], seconds=0.5), CPU)


@pytest.mark.parametrize(("ours", "theirs"), [(OURS, b""), (b"", OURS)])
def test_a_secret_of_one_machine_alone_is_named(ours: bytes, theirs: bytes) -> None:
    here, there = met(ours, theirs)
    told = ("rank 1 has no rank_secret_file, and rank 0 has one", "rank 0 has a rank_secret_file, and rank 1 none")
    if not ours:
        told = ("rank 1 has a rank_secret_file, and rank 0 none", "rank 0 has no rank_secret_file, and rank 1 has one")
    assert here.endswith(told[0]) and there.endswith(told[1])


def test_a_rank_that_is_taken_is_not_taken_again() -> None:
    listener = socket.create_server((HOST, 0))
    alone = World.join(0, 1, Meeting(listener.getsockname()[1], listener, seconds=5.0), CPU)
    try:
        meeting = Meeting(alone._meeting.port, seconds=5.0)
        with pytest.raises(TimeoutError, match="another process is or was this rank"):
            world._enter(meeting.store(0, 1), 0, HOST, asks=False)
        world._enter(dataclasses.replace(meeting, attempt=1).store(0, 1), 0, HOST, asks=False)  # of another start
    finally:
        alone.leave()


def test_groups_are_proved_and_ranks_are_named_by_their_whole_address(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = list[Any]()
    monkeypatch.setattr(Meeting, "prove", lambda self, group=None: proved.append(group))
    monkeypatch.setattr(world.dist, "new_group", lambda ranks, **_: ranks)
    told = {f"address-{rank}": address for rank, address in enumerate((b"10.0.0.9", b"10.0.0.1", b"10.0.0.12"))}
    store: Any = SimpleNamespace(get=told.__getitem__)
    made = World(0, 3, store, Meeting(1), ExitStack())
    assert made.group() == [0, 1, 2] and proved == [[0, 1, 2]]
    made.pulse = Pulse(store, 0, {})
    assert made.named("Connection closed by peer [10.0.0.12]:5") == "rank 2 at 10.0.0.12"
    assert made.named("Read error [10.0.0.3]:5") is None and made.named("[10.0.0.9]") is None


def test_ranks_that_are_gone_are_not_waited_for_without_end() -> None:
    class Asked:
        count = 0

        def check(self, names: list[str]) -> bool:
            self.count += 1
            return False

    asked: Any = Asked()
    World(0, 3, asked, Meeting(1), ExitStack()).wait_for_ended([1, 2], 0.05)
    assert asked.count >= 2
