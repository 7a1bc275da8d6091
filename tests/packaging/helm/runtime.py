"""Becomes one container: `unshare --mount --pid --net --fork python runtime.py SPEC`, as root, on Linux.

A root of its own that is read-only but for the mounts, the user and the rights that a pod's security context asks for,
and the network of another container or an empty one. Needs nothing but the standard library and `mount`.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
LAST_CAPABILITY = 40


def mount(*args: str) -> None:
    """Run mount(8)."""
    subprocess.run(["mount", *args], check=True)


def build_root(root: Path, spec: dict[str, Any]) -> None:
    """Mount everything that the container sees below `root`."""
    mount("-t", "tmpfs", "-o", "mode=0755", "none", str(root))
    for link in ("bin", "sbin", "lib", "lib64"):
        if Path("/", link).is_symlink():
            (root / link).symlink_to(os.readlink(Path("/", link)))
    for source, target, writable in spec["binds"]:
        place = root / target.lstrip("/")
        if Path(source).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        mount("--rbind", source, str(place))
        if not writable:
            mount("-o", "remount,bind,ro", str(place))
    (root / "proc").mkdir()
    mount("-t", "proc", "proc", str(root / "proc"))
    for path in spec["memory"]:
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mount("-t", "tmpfs", "-o", "mode=1777", "none", str(root / path.lstrip("/")))
    if spec["read_only"]:
        mount("-o", "remount,ro", str(root))


def raise_loopback() -> None:
    """A new network has nothing but a loopback that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def give_up_rights(spec: dict[str, Any]) -> None:
    """The user, the groups, no capability, and no way back."""
    prctl = ctypes.CDLL(None).prctl
    for capability in range(LAST_CAPABILITY + 1):
        prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups(spec["groups"])
    os.setresgid(*[spec["gid"]] * 3)
    os.setresuid(*[spec["uid"]] * 3)
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # A change of the user clears what `unshare --kill-child` had asked for: without it servers outlive their test.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """The process; it ends as the container's own."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    root = Path(spec["root"])
    build_root(root, spec)
    if spec["own_network"]:
        raise_loopback()
    os.chroot(root)
    os.chdir(spec["directory"])
    give_up_rights(spec)
    os.execvpe(spec["command"][0], spec["command"], spec["env"])


if __name__ == "__main__":
    main()
