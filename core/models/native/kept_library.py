"""What makes a file of compiled code fit to be loaded: whose it is, and that it is what a compiler made, whole.

A library is code, and a part of one kills the process that loads it (SIGBUS): a disk was full, a machine lost power
between write and rename. So each has a digest beside it, written last and only for a library that was loaded once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

DIGEST = ".sha256"
"""What the name of a library ends with that holds its digest, in hexadecimal."""
LOCK = ".lock"
LOOK_SECONDS = 0.2


class ExtensionUnavailable(Exception):
    """It cannot be built or loaded here; the message says why, in one line."""


def refuse_foreign(path: Path) -> None:
    """Raises ExtensionUnavailable if others than this user and root could have written `path`, and OSError."""
    facts = path.stat()
    if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
        raise ExtensionUnavailable(f"others can write to {path}, and what is there would be run")


def is_whole(library: Path) -> bool:
    """Whether its bytes are those that its digest was made of. Raises OSError where it cannot be looked at."""
    try:
        return digest_path(library).read_text() == digest(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def digest(library: Path) -> str:
    """As it is kept."""
    with library.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() + "\n"


def digest_path(library: Path) -> Path:
    """Where the digest of `library` is kept."""
    return library.with_name(library.name + DIGEST)


def keep(made: Path, library: Path) -> None:
    """Move a library that was proved to its place, with its digest; both are on the disk before they have their names.

    A process that looks in between finds the digest of another library, or none, and then waits for the lock that the
    caller holds.
    """
    digest_made = digest_path(made)
    digest_made.write_text(digest(made))
    for path in (made, digest_made):
        path.chmod(0o755)  # whatever the umask: what a group can write is not loaded
        _to_disk(path)
    made.replace(library)
    digest_made.replace(digest_path(library))
    with contextlib.suppress(OSError):  # not every file system has it for directories
        _to_disk(library.parent)


@contextlib.contextmanager
def building(library: Path, patience: float) -> Iterator[bool]:
    """Alone among processes that build `library`: False if that cannot be had, after `patience` seconds at most."""
    descriptor = os.open(
        library.with_name(library.name + LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        yield _locked(descriptor, time.monotonic() + patience)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems have no locks: then two may build, and the last one's stays.
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR) or time.monotonic() > until:
                return False
            time.sleep(LOOK_SECONDS)
        else:
            return True


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
