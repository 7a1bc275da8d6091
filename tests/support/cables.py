"""Another machine's network: a network namespace, and the cable to it, which can be cut, or be slow."""

from __future__ import annotations

import fcntl
import ipaddress
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

NETWORK = ipaddress.ip_network("198.18.0.0/15")
"""Whose addresses are for tests (RFC 2544)."""
_NUMBERS = itertools.count()
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""Of <linux/if_tun.h>."""


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


@dataclass(frozen=True)
class Slow:
    """What befalls packets on the way: see `slow_wire`."""

    least: float
    most: float
    """Milliseconds."""
    lost: int
    seed: int


@contextmanager
def laid(slow: Slow | None = None) -> Iterator[Cable]:
    """A cable to a new network; raises CalledProcessError where `may_cut` is false."""
    # Cards of a network that was deleted go by and by.
    number = next(_NUMBERS)
    # Other processes have cables too.
    first = NETWORK[4 * ((os.getpid() * 16 + number) % (NETWORK.num_addresses // 4))]
    made = Cable(f"slipstream-{os.getpid()}-{number}", str(first + 1), str(first + 2))
    name, here = made.name, f"slip{os.getpid()}-{number}"
    _ip("netns", "add", name)
    with ExitStack() as stack:
        stack.callback(_ip, "netns", "delete", name)
        if slow is None:
            _ip("link", "add", here, "type", "veth", "peer", "name", "there", "netns", name)
            stack.callback(_ip, "link", "delete", here)
        else:
            stack.enter_context(_carried(here, name, slow))
        _ip("address", "add", f"{made.here}/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", name, "address", "add", f"{made.there}/30", "dev", "there")
        _ip("-n", name, "link", "set", "lo", "up")
        made.mend()
        yield made


@contextmanager
def _carried(here: str, name: str, slow: Slow) -> Iterator[None]:
    """Both ends of a slow cable, of which the second is in the namespace `name`, and a process that carries packets."""
    with ExitStack() as stack:
        ends = [_tun(each, stack) for each in (here, f"far{here}")]
        _ip("link", "set", f"far{here}", "netns", name)
        _ip("-n", name, "link", "set", f"far{here}", "name", "there")
        told = [*ends, slow.least, slow.most, slow.lost, slow.seed]
        command = [sys.executable, "-m", "tests.support.slow_wire", *map(str, told)]
        wire = stack.enter_context(subprocess.Popen(command, pass_fds=ends))
        stack.callback(wire.kill)
        yield


def _tun(name: str, stack: ExitStack) -> int:
    """A descriptor of a new TUN device, which is there as long as any process holds it."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    stack.callback(os.close, end)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return end
