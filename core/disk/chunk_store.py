"""A directory of chunks, each a file, up to a number of bytes. The files that were not used for longest give way.

Files are read and written whole, by threads, with the kernel's vectored calls: NIXL's POSIX plugin took 1.0 to 1.3
times as long for either on the machine where it was tried (core/decisions/0071). What is there stays valid for the next
process, so nothing is trusted that was written by half: a file appears under its name when it is whole, and tells its
length and a checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from core.disk.chunk_names import tenant_digits
from core.errors import ConfigError

log = logging.getLogger(__name__)

Parts = Sequence[memoryview]

MAGIC: Final = b"slipkv01"
HEAD: Final = struct.Struct("<8sQI4x")
"""Magic, bytes that follow, their CRC-32."""
PARTIAL: Final = ".partial"
LOCK: Final = "lock"
VECTORS: Final = 512
"""Parts of one call; Linux takes 1,024."""
QUIET_SECONDS: Final = 60.0
"""Between two lines of the log about a disk that does not work; writing rests as long."""


class ChunkStore:
    """One process's, by a lock in the directory. Thread-safe but for `close`."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        """Finds what an earlier process has left. Raises ConfigError for a directory that cannot be used."""
        self._directory = directory
        self._nbytes = nbytes
        self._mutex = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """By name, the least recently used first."""
        self.used_bytes = 0
        self.evicted = self.failures = 0
        """Chunks that gave way to others; chunks that could not be read or written."""
        self._flushes = 0
        self._rests_until = 0.0
        self._lock = _locked(directory)
        try:
            self._scan()
        except OSError as error:
            self.close()
            raise ConfigError(f"disk_cache {directory}: {error.strerror or error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def write(self, name: str, parts: Parts) -> bool:
        """Keep `parts` under `name`, a name of hexadecimal digits; whether they are. Blocks, and raises nothing.

        What cannot be kept is not: a cache. A disk that does not work is left alone for QUIET_SECONDS.
        """
        size = HEAD.size + sum(part.nbytes for part in parts)
        with self._mutex:
            flushes = self._flushes
            if name in self._sizes or size > self._nbytes or time.monotonic() < self._rests_until:
                return name in self._sizes
            self._make_room(size)
        path = self._directory / name
        try:
            self._write_whole(path.with_suffix(PARTIAL), parts, size)
            with self._mutex:
                if flushes != self._flushes:
                    raise FileNotFoundError("given up meanwhile")
                os.replace(path.with_suffix(PARTIAL), path)
                self.used_bytes += size - self._sizes.pop(name, 0)
                self._sizes[name] = size
                self._make_room(0)
            return True
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                path.with_suffix(PARTIAL).unlink()
        except OSError as error:
            with contextlib.suppress(OSError):
                path.with_suffix(PARTIAL).unlink()
            self._failed("written", error)
        return False

    def read(self, name: str, parts: Parts) -> bool:
        """Fill `parts` with what is kept under `name`; whether that was whole. Blocks, and raises nothing.

        What is not whole is given up, and `parts` may hold anything.
        """
        path = self._directory / name
        try:
            with open(path, "rb", buffering=0) as file:
                magic, size, checksum = HEAD.unpack(file.read(HEAD.size))
                whole = magic == MAGIC and size == sum(part.nbytes for part in parts)
                if whole and _filled(file.fileno(), parts) and _checksum(parts) == checksum:
                    with self._mutex:
                        if name in self._sizes:
                            self._sizes.move_to_end(name)
                    # By which the next process knows what was used.
                    os.utime(path)
                    return True
            self._failed("read", OSError(f"{path} is not whole"))
        except FileNotFoundError:
            pass  # it gave way
        except (OSError, struct.error) as error:
            self._failed("read", error)
        self._drop(name)
        return False

    def flush(self, tenant: str | None = None) -> int:
        """Delete every chunk, of `tenant` only if given, also what is being written; returns how many."""
        begin = "" if tenant is None else tenant_digits(tenant)
        with self._mutex:
            self._flushes += 1
            names = [name for name in self._sizes if name.startswith(begin)]
        for name in names:
            self._drop(name)
        return len(names)

    def close(self) -> None:
        """Leave the directory to the next process. Idempotent; after the last call of any other method."""
        os.close(self._lock)
        self._lock = os.open(os.devnull, os.O_RDONLY)

    def _scan(self) -> None:
        found = list[tuple[float, str, int]]()
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(PARTIAL):
                    os.unlink(entry.path)
                elif entry.name != LOCK and entry.is_file(follow_symlinks=False):
                    told = entry.stat(follow_symlinks=False)
                    found.append((told.st_mtime, entry.name, told.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.used_bytes += size
        self._make_room(0)

    def _make_room(self, size: int) -> None:
        """For one more of `size` bytes. With the mutex, or alone."""
        while self.used_bytes + size > self._nbytes and self._sizes:
            name, held = self._sizes.popitem(last=False)
            self.used_bytes -= held
            self.evicted += 1
            with contextlib.suppress(OSError):
                os.unlink(self._directory / name)

    def _write_whole(self, path: Path, parts: Parts, size: int) -> None:
        head = HEAD.pack(MAGIC, size - HEAD.size, _checksum(parts))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _written(descriptor, [memoryview(head), *parts])
        finally:
            os.close(descriptor)

    def _drop(self, name: str) -> None:
        with self._mutex:
            self.used_bytes -= self._sizes.pop(name, 0)
        with contextlib.suppress(OSError):
            os.unlink(self._directory / name)

    def _failed(self, what: str, error: OSError | struct.error) -> None:
        now = time.monotonic()
        with self._mutex:
            self.failures += 1
            if now < self._rests_until:
                return
            self._rests_until = now + QUIET_SECONDS
        log.warning("disk_cache: prefixes are not %s, and nothing is written for a minute: %s", what, error)


def check_directory(directory: Path) -> None:
    """Raises ConfigError for a directory that a store cannot use now."""
    os.close(_locked(directory))


def _locked(directory: Path) -> int:
    """The descriptor of the lock of `directory`, which is made if need be. Raises ConfigError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & stat.S_IWOTH:
            raise ConfigError(f"disk_cache {directory}: every user of the machine may write there")
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"disk_cache {directory}: {error.strerror or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"disk_cache {directory}: another server uses it") from None
    return lock


def _checksum(parts: Parts) -> int:
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def _filled(descriptor: int, parts: Parts) -> bool:
    """Whether the file had enough for all `parts`."""
    left = list(parts)
    while left:
        if not (count := os.readv(descriptor, left[:VECTORS])):
            return False
        left = _rest(left, count)
    return True


def _written(descriptor: int, parts: Parts) -> None:
    left = list(parts)
    while left:
        left = _rest(left, os.writev(descriptor, left[:VECTORS]))


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """`parts` without their first `count` bytes."""
    for place, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[place + 1 :]]
        count -= part.nbytes
    return []
