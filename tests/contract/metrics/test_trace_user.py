"""Who is given a trace on the server's machine: its own user and root, as the kernel says; each is in the audit log."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from core.lanes import LaneRecorder
from service.metrics.peer_user import user_of
from service.metrics.trace import Refusal, TraceDoor
from service.process.audit_log import QUIET_SECONDS
from tests.security.test_audit import Lines
from tests.security.test_audit import lines as lines
from tests.support.servers import Serve

NOBODY = 65534
ASK = """
import encodings.idna, os, socket, sys
host, port = sys.argv[1].split(":")
# Nothing is imported from here on: the interpreter's files may be out of reach for that user.
os.setuid(int(sys.argv[2]))
with socket.create_connection((host, int(port)), 30) as connection:
    connection.sendall(b"POST /trace?seconds=0.01 HTTP/1.0\\r\\n\\r\\n")
    print(connection.recv(12).split()[1].decode())
"""


def asked(address: str, user: int) -> str:
    """The status that a process of `user` gets."""
    command = [sys.executable, "-I", "-c", ASK, address, str(user)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_the_kernel_says_whose_connection_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            address = client.getsockname()
            assert user_of(address, port) == os.geteuid()
            assert user_of(address, port + 1) is None and user_of(("127.0.0.1", 1), port) is None


def test_a_client_that_has_closed_its_socket_is_not_taken_for_root() -> None:
    """The kernel lists what no process holds any more as user 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        address = client.getsockname()
        with server.accept()[0] as accepted:
            client.close()
            assert accepted.recv(1) == b""
            assert user_of(address, port) is None


@pytest.mark.parametrize(("user", "allowed"), [(os.geteuid(), True), (0, True), (NOBODY, False), (None, False)])
def test_a_local_trace_is_for_the_servers_user(user: int | None, allowed: bool, lines: Lines) -> None:
    door = TraceDoor("local", LaneRecorder, dict)
    found = [door.record("127.0.0.1", "seconds=0.001", lambda: user) for _ in range(3)]
    assert [isinstance(each, Refusal) for each in found] == [not allowed] * 3
    told = [(each["event"], each["method"]) for each in lines.told()]
    # A refusal again and again is one line in QUIET_SECONDS.
    assert QUIET_SECONDS > 1 and told == ([("act", "/trace")] * 3 if allowed else [("refused", "/trace")])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
async def test_another_user_of_the_machine_is_refused(serve: Serve) -> None:
    async with serve() as serving:
        address = f"127.0.0.1:{serving.server.metrics_port}"
        codes = [await asyncio.to_thread(asked, address, user) for user in (NOBODY, os.geteuid())]
    async with serve(trace_endpoint="any") as serving:
        address = f"127.0.0.1:{serving.server.metrics_port}"
        codes.append(await asyncio.to_thread(asked, address, NOBODY))
    assert codes == ["403", "200", "200"]
