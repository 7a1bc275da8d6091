"""Ports: for programs that have to be told one, and those that this process listens on."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def free_port() -> int:
    """Free now, and taken by another program at any moment: what can bind port 0 by itself should do that."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening() -> set[str]:
    """Addresses, hexadecimal, that this process listens on."""
    own = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink() and each.exists()}
    rows = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}
