"""The user whose process is at the other end of a connection from this machine, as the kernel lists it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _STATE, _USER = 1, 2, 3, 7
"""Columns of a table (proc(5)); an address there ends with ":" and the port in hexadecimal digits."""
_ESTABLISHED: Final = "01"


def user_of(client: tuple[Any, ...], server_port: int) -> int | None:
    """The user id of the client of a connection, given its address; None if the kernel's tables do not say.

    A client on this machine has a line of its own there, with its port as the local one and ours as the remote one. If
    several lines of different users have these two ports, which needs different addresses, the answer is None. A socket
    that its process has closed is no established connection and does not count: the kernel lists it as root's.
    """
    found: set[int] = set()
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            ports = tuple(int(columns[place].rpartition(":")[2], 16) for place in (_LOCAL, _REMOTE))
            if columns[_STATE] != _ESTABLISHED:
                continue
            if ports == (client[1], server_port):
                found.add(int(columns[_USER]))
    return found.pop() if len(found) == 1 else None
