"""The part that this machine has in an engine of several ranks: which ranks, on which devices, and where all meet."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import Final

import torch

from core.config import EngineConfig
from core.distributed.meeting import HOST, Meeting
from core.errors import ConfigError, StartupError
from core.secret_file import read_secret

PAUSE: Final = 0.5
"""Seconds between two attempts to resolve a name: those of pods come a little after the pods."""


def meeting_of(config: EngineConfig, device: torch.device, *, leads: bool) -> Meeting:
    """Where the ranks of an engine meet; rank 0, which `leads`, listens there from now on.

    Raises ConfigError for devices that this machine does not have, StartupError for an address that cannot be used.
    """
    nodes, size = config.nodes, config.model.ranks
    wanted = nodes.first_device + len(nodes.ranks_here(size))
    if device.type == "cuda" and torch.cuda.device_count() < wanted:
        there = f"there are {torch.cuda.device_count()}"
        raise ConfigError(f"{config.model.shared_by} {size} needs {wanted} devices here: {there}")
    if nodes.nnodes == 1:
        listener = socket.create_server((HOST, 0)) if leads else None
        return Meeting(0 if listener is None else listener.getsockname()[1], listener)
    secret = read_secret("rank_secret_file", nodes.rank_secret_file)
    address = _resolved(nodes.master_addr, nodes.join_timeout)
    listener = _listener(address, nodes.master_port) if leads and not nodes.hosted else None
    return Meeting(nodes.master_port, listener, address, secret, nodes.join_timeout, nodes.attempt)


def _resolved(name: str, seconds: float) -> str:
    """An address of `name`, once it has one. Raises StartupError where it has none within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() > end:
            raise StartupError(f"master_addr {name}: the name cannot be resolved within {seconds:.0f} s ({reason})")
        time.sleep(PAUSE)


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        advice = ": it takes an address of machine 0" if error.errno == errno.EADDRNOTAVAIL else ""
        raise StartupError(
            f"master_addr {address}, master_port {port}: {os.strerror(error.errno or 0).lower()}{advice}"
        ) from None
