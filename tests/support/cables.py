"""Another machine's network: a network namespace, and the cable between it and this one, which can be cut."""

from __future__ import annotations

import ipaddress
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = ipaddress.ip_network("198.18.0.0/15")
"""Whose addresses are for tests (RFC 2544)."""
_NUMBERS = itertools.count()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def may_cut() -> bool:
    """Whether this process may make networks."""
    try:
        _ip("netns", "add", name := f"slipstream-{os.getpid()}")
        _ip("netns", "delete", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@dataclass(frozen=True)
class Cable:
    """Between this network and the namespace `name`."""

    name: str
    here: str
    """The address of this end."""
    there: str

    @property
    def within(self) -> tuple[str, ...]:
        """What runs a command on the other machine, and becomes it."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Nothing arrives any more, and nothing is told of that."""
        _ip("-n", self.name, "link", "set", "there", "down")

    def mend(self) -> None:
        """All arrives again."""
        _ip("-n", self.name, "link", "set", "there", "up")


@contextmanager
def laid() -> Iterator[Cable]:
    """A cable to a new network; raises CalledProcessError where `may_cut` is false."""
    # Cards of a network that was deleted go by and by.
    number = next(_NUMBERS)
    # Other processes have cables too.
    first = NETWORK[4 * ((os.getpid() * 16 + number) % (NETWORK.num_addresses // 4))]
    made = Cable(f"slipstream-{os.getpid()}-{number}", str(first + 1), str(first + 2))
    name, here = made.name, f"slip{os.getpid()}-{number}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", "there", "netns", name)
        _ip("address", "add", f"{made.here}/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", name, "address", "add", f"{made.there}/30", "dev", "there")
        _ip("-n", name, "link", "set", "lo", "up")
        made.mend()
        yield made
    finally:
        _ip("link", "delete", here)
        _ip("netns", "delete", name)
