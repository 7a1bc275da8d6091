"""A value made from small files and kept current while they change: tokens and certificates are rotated under a server.

Files are not watched. Each use of the value makes a `stat` of them (`service.access.timed_look`), which follows links.
So the swap of a directory link, by which Kubernetes replaces a mounted secret, is seen like any other change.
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
from service.access.timed_look import looked_at_in_time

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024

SETTLE_SECONDS = 2.0
"""Seconds after a change of the stamp in which every look reads the files. A second write within one tick of the file
system's clock leaves the stamp as it was, and a writer that does not rename may still be at work."""

GRACE_SECONDS = 1.0
"""Seconds that a file may be away or empty since it was last seen in order. An editor that writes in place makes it so
for a moment; a rename and the swap of a directory link never do."""

T = TypeVar("T")
Stamp = tuple[tuple[int, ...] | None, ...]


class Reloaded(Generic[T]):
    """The value that `parse` makes of the files' contents. Thread-safe.

    Construction raises StartupError for files that cannot be read or parsed. Later such a failure is logged, and the
    value is `failed`. The last good value stays then; with `spoilt` the value is `spoilt(last_good, contents)` instead,
    where contents are None if they cannot be read. With `spoilt`, a file that is away or empty is no failure until
    GRACE_SECONDS after it was last seen in order. `what` names the value in the log. Contents are never logged, so
    `parse` must not quote them in its errors.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[str | Path],
        parse: Callable[[tuple[bytes, ...]], T],
        spoilt: Callable[[T, tuple[bytes, ...] | None], T] | None = None,
    ) -> None:
        self._what = what
        self._paths = tuple(map(Path, paths))
        self._parse, self._spoilt = parse, spoilt
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._fine_at = time.monotonic()
        self._settles_at = self._fine_at + SETTLE_SECONDS
        contents = self._read()
        self._digest: bytes | None = _digest(contents)
        self._bad: bytes | None = None
        # The error logged last, so that each cause is logged once: while files settle, every look meets it again.
        self._told = ""
        self._waiting = False
        self._value = self._good = self._made_of(contents)

    @looked_at_in_time
    def current(self) -> T:
        """The newest value; the same object for as long as the contents are the same."""
        with self._lock:
            stamp, now = self._look(), time.monotonic()
            if stamp != self._stamp:
                self._stamp, self._settles_at = stamp, now + SETTLE_SECONDS
            elif now >= self._settles_at and not self._waiting:
                self._fine_at = self._fine_at if self._told else now
                return self._value
            self._renew(now)
            return self._value

    @property
    def failed(self) -> bool:
        """Whether the files, as they are now, cannot be used."""
        self.current()
        return bool(self._told)

    def _renew(self, now: float) -> None:
        contents: tuple[bytes, ...] | None = None
        try:
            contents = self._read()
            digest = _digest(contents)
            if self._told and digest == self._bad:
                # Parsed already; while files settle, every look comes here.
                self._waiting = False
                return
            if digest != self._digest:
                self._good = self._value = self._made_of(contents)
                self._digest = digest
                log.info("%s: read again after a change", self._what)
            self._told, self._waiting, self._fine_at = "", False, now
        except StartupError as error:
            absent = contents is None or not all(contents)
            self._waiting = self._spoilt is not None and absent and now - self._fine_at < GRACE_SECONDS
            if not self._waiting:
                self._bad = None if contents is None else _digest(contents)
                self._fail(contents, error.message)

    def _made_of(self, contents: tuple[bytes, ...]) -> T:
        """The value of `contents`. Any error of `parse` becomes StartupError: no content may fail calls that look."""
        try:
            return self._parse(contents)
        except StartupError:
            raise
        except Exception as error:
            paths = ", ".join(map(str, self._paths))
            raise StartupError(f"{paths}: cannot be used: {type(error).__name__}") from None

    def _fail(self, contents: tuple[bytes, ...] | None, why: str) -> None:
        going_on = "going on with the last good one"
        if self._spoilt is not None:
            self._value = self._spoilt(self._good, contents)
            # The last good contents may come back, and must then be parsed again to replace this value.
            self._digest = None
            going_on = "what it is not seen to hold is refused"
        if why != self._told:
            self._told = why
            log.error("%s: %s; %s", self._what, why, going_on)

    def _look(self) -> Stamp:
        return tuple(map(_stamp, self._paths))

    def _read(self) -> tuple[bytes, ...]:
        return tuple(map(_bounded_read, self._paths))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Numbers that change when the file is written, replaced or reached through another link; None without a file."""
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
