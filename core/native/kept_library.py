"""Checks whether a file of compiled code may be loaded: by its owner and permissions, and by a digest of its bytes.

A library is code, so no other user may have written it. A truncated one kills the process that loads it (SIGBUS), as
after a full disk or a power loss between write and rename. So each library has a digest beside it, which is written
last, and only after the library was loaded once.
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
"""Suffix of the file beside a library that holds its digest, in hexadecimal."""
LOCK = ".lock"
LOOK_SECONDS = 0.2


class ExtensionUnavailable(Exception):
    """The extension cannot be built or loaded here; the message says why, in one line."""


def refuse_foreign(path: Path) -> None:
    """Raise ExtensionUnavailable if users other than this one and root could have written `path`.

    Raises OSError if it cannot be examined.
    """
    facts = path.stat()
    if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
        raise ExtensionUnavailable(f"others can write to {path}, and what is there would be run")


def is_whole(library: Path) -> bool:
    """Whether the bytes of `library` match the digest beside it. Raises OSError if it cannot be read."""
    try:
        return digest_path(library).read_text() == digest(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def digest(library: Path) -> str:
    """SHA-256 of `library` in hexadecimal and a newline, as in the file beside it."""
    with library.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() + "\n"


def digest_path(library: Path) -> Path:
    """The file that holds the digest of `library`."""
    return library.with_name(library.name + DIGEST)


def keep(made: Path, library: Path) -> None:
    """Move a library that was loaded once to its place, with its digest. Both are flushed to disk before the renames.

    A process that looks between the two renames finds the digest of another library, or none, and then waits for the
    lock that the caller holds.
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
    """Hold the lock for building `library`; yields False if it was not free within `patience` seconds."""
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
