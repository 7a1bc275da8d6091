"""`python -m tests.security.serve_watched FILE ARGS`: the real command line, with every connection that Python opens or
name that it looks up written to FILE."""

from __future__ import annotations

import socket
import sys
from typing import Any


def watch(path: str) -> None:
    """Record before anything of the server is imported."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def note(what: str) -> None:
        with open(path, "a") as file:
            file.write(what + "\n")

    def connecting(self: socket.socket, address: Any) -> None:
        note(f"connect {address}")
        connect(self, address)

    def looking_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in (None, "", "127.0.0.1", "::1"):
            note(f"look up {host}")
        return look_up(host, *args, **kwargs)

    socket.socket.connect = connecting  # type: ignore[method-assign]
    socket.getaddrinfo = looking_up


if __name__ == "__main__":
    watch(sys.argv.pop(1))
    from service.cli.cli import main

    main()
