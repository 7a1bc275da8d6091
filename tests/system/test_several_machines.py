"""Two ranks on two machines, and the cable between them: they begin, end and fail together."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.client import CallFailed, Chunk, SlipstreamClient
from tests.chaos.process import PATIENCE, ServerProcess
from tests.support.cables import Cable, laid, may_cut
from tests.support.ports import free_port
from tests.support.until import until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not may_cut(), reason="networks are made by root, with iproute2"),
]

GONE_SECONDS = 60.0
"""Within which machines that have lost each other have ended: silence counts after 30."""
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")
"""gRPC's, and the metrics'."""
LONG = {"max_tokens": 1800, "temperature": 0.0, "ignore_eos": True, "want_text": False}


@pytest.fixture
def cable() -> Iterator[Cable]:
    with laid() as made:
        yield made


@contextmanager
def machines(cable: Cable, folder: Path, **second: Any) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """The server, and what follows it on the other machine; neither is waited for."""
    (secret := folder / "secret").write_text("sixteen bytes or more")
    same: dict[str, Any] = {"tensor_parallel": 2, "nnodes": 2, "master_addr": cable.here, "master_port": free_port()}
    same |= {"rank_secret_file": secret, "device": "cpu", "log_level": "info", "program": "service"}
    with closing(ServerProcess(**same, max_running_requests=8)) as first:
        follower = ServerProcess(within=cable.within, node_rank=1, **(same | {"max_running_requests": 8} | second))
        with closing(follower):
            yield first, follower


async def tokens(client: SlipstreamClient, first: asyncio.Event | None = None, **asked: Any) -> list[int]:
    found = list[int]()
    async for event in client.generate([5, 6, 7], **LONG | asked):
        if isinstance(event, Chunk):
            found += event.token_ids
            if first is not None:
                first.set()
    return found


async def lost(servers: tuple[ServerProcess, ServerProcess], cut: Callable[[], None], code: int) -> None:
    """Once `cut()` was called a stream ends with ENGINE_DEAD, and so do both machines, the second one with `code`."""
    async with servers[0].client() as client:
        begun = asyncio.Event()
        stream = asyncio.create_task(tokens(client, begun))
        await asyncio.wait_for(begun.wait(), PATIENCE)
        cut()
        with pytest.raises(CallFailed) as failed:
            await asyncio.wait_for(stream, GONE_SECONDS)
        assert (failed.value.code.name, failed.value.reason) == ("UNAVAILABLE", "ENGINE_DEAD")
    assert (await servers[0].exit_code(GONE_SECONDS))[0] == 1
    assert (await servers[1].exit_code(GONE_SECONDS))[0] == code


async def test_both_serve_and_end_with_the_first(cable: Cable, tmp_path: Path) -> None:
    with closing(ServerProcess(program="service", native="off")) as plain, machines(cable, tmp_path) as servers:
        async with plain.wait_ready().client() as alone, servers[0].wait_ready().client() as client:
            expected = await tokens(alone, max_tokens=200)
            assert await tokens(client, max_tokens=200) == expected
            # One that is told to end before the first does changes nothing.
            servers[1].send(signal.SIGTERM)
            await until(lambda: "SIGTERM: this machine ends with rank 0" in servers[1].errors)
            assert await tokens(client, max_tokens=200) == expected
        assert not any(value for name, value in (await servers[0].metrics()).items() if "assert_failures" in name)
        servers[0].send(signal.SIGTERM)
        assert [(await each.exit_code(PATIENCE))[0] for each in servers] == [0, 0]


async def test_a_second_signal_ends_a_machine_at_once(cable: Cable, tmp_path: Path) -> None:
    with machines(cable, tmp_path) as servers:
        servers[0].wait_ready()
        servers[1].send(signal.SIGTERM)
        await until(lambda: "a second signal ends it at once" in servers[1].errors)
        await lost(servers, lambda: servers[1].send(signal.SIGTERM), 128 + signal.SIGTERM)


async def test_a_cable_that_is_cut_ends_both(cable: Cable, tmp_path: Path) -> None:
    """No connection closes: each notices by the other's silence."""
    with machines(cable, tmp_path) as servers:
        servers[0].wait_ready()
        await lost(servers, cable.cut, 1)
        silent = "has given no sign of life for 30 s"
        assert f"rank 1 at {cable.there} {silent}" in servers[0].errors
        assert f"rank 0 at {cable.here} {silent}" in servers[1].errors


async def test_a_machine_that_is_lost_is_named(cable: Cable, tmp_path: Path) -> None:
    with machines(cable, tmp_path) as servers:
        servers[0].wait_ready()
        await lost(servers, lambda: servers[1].send(signal.SIGKILL), -signal.SIGKILL)
        assert f"RankLost: rank 1 at {cable.there} is gone" in servers[0].errors


async def test_a_stranger_is_no_machine_of_ours(cable: Cable, tmp_path: Path) -> None:
    (other := tmp_path / "other").write_text("sixteen bytes of others")
    with machines(cable, tmp_path, rank_secret_file=other) as servers:
        assert [(await each.exit_code(PATIENCE))[0] for each in servers] == [2, 2]
        assert "rank 1 has another rank_secret_file than rank 0, or is none of ours" in servers[0].errors


async def test_ranks_listen_where_the_other_machine_is_and_nowhere_else(cable: Cable, tmp_path: Path) -> None:
    with machines(cable, tmp_path) as servers:
        servers[0].wait_ready()
        for server, address in zip(servers, (cable.here, cable.there), strict=True):
            (number,) = struct.unpack("<I", socket.inet_aton(address))
            assert _listens(server.pid) <= {f"{number:08X}", *LOOPBACK} and f"{number:08X}" in _listens(server.pid)


def _listens(pid: int) -> set[str]:
    """The addresses, hexadecimal, at which it does."""
    own = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}
