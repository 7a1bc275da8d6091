"""A value made from small files and kept current while they change: tokens and certificates are rotated under a server.

No thread and no watch descriptor: whoever asks for the value pays for a `stat`, which follows links, so that the swap
of a directory link (how Kubernetes replaces a mounted secret) is a change like any other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from core.errors import StartupError

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024

SETTLE_SECONDS = 2.0
"""How long a change of the stamp makes every look read the files: a second write within one tick of the file system's
clock leaves the stamp as it was, and a writer that does not rename may still be at work."""

T = TypeVar("T")
Stamp = tuple[tuple[int, ...] | None, ...]


class Reloaded(Generic[T]):
    """What `parse` makes of the files' contents. Thread-safe.

    Construction raises StartupError for what cannot be read or parsed; later, that is logged and the last good value
    stays. `what` names the value in the log; contents are never logged, so `parse` may not quote them in its errors.
    """

    def __init__(self, what: str, paths: Sequence[str | Path], parse: Callable[[tuple[bytes, ...]], T]) -> None:
        self._what = what
        self._paths = tuple(map(Path, paths))
        self._parse = parse
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._settles_at = time.monotonic() + SETTLE_SECONDS
        contents = self._read()
        self._digest = _digest(contents)
        # Told once per cause; while files settle, every look meets the same error.
        self._told = ""
        self._value = parse(contents)

    def current(self) -> T:
        """The newest good value; the same object for as long as the contents are the same."""
        with self._lock:
            stamp, now = self._look(), time.monotonic()
            if stamp != self._stamp:
                self._stamp, self._settles_at = stamp, now + SETTLE_SECONDS
            elif now >= self._settles_at:
                return self._value
            self._renew()
            return self._value

    def _renew(self) -> None:
        try:
            contents = self._read()
            digest = _digest(contents)
            if digest != self._digest:
                self._value = self._parse(contents)
                self._digest = digest
                log.info("%s: read again after a change", self._what)
            self._told = ""
        except StartupError as error:
            if error.message != self._told:
                self._told = error.message
                log.error("%s: %s; going on with the last good one", self._what, error.message)

    def _look(self) -> Stamp:
        return tuple(map(_stamp, self._paths))

    def _read(self) -> tuple[bytes, ...]:
        return tuple(map(_bounded_read, self._paths))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes when the file is written, replaced or reached through another link; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _bounded_read(path: Path) -> bytes:
    try:
        if not path.is_file():
            # Opening a pipe would wait for its writer for ever.
            raise StartupError(f"{path}: {'is no regular file' if path.exists() else 'does not exist'}")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise StartupError(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
    return content


def _digest(contents: tuple[bytes, ...]) -> bytes:
    whole = hashlib.sha256()
    for content in contents:
        whole.update(len(content).to_bytes(8, "little") + content)
    return whole.digest()
