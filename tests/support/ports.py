"""Ports for programs that have to be told one."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Free now, and taken by another program at any moment: what can bind port 0 by itself should do that."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
