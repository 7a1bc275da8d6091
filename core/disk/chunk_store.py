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
import re
import stat
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
LENGTH: Final = 80
NAME: Final = re.compile(r"[0-9a-f]{80}")
"""Of a chunk (`chunk_names`). Other files of the directory are not ours."""
VECTORS: Final = 512
"""Parts of one call; Linux takes 1,024."""
QUIET_SECONDS: Final = 60.0
"""Between two lines of the log about a disk that does not work; after a write that failed none is tried as long."""


class ChunkStore:
    """One process's, by a lock in the directory. Thread-safe but for `close`."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        """Finds what an earlier process has left. Raises ConfigError for a directory that cannot be used."""
        self._nbytes = nbytes
        self._mutex = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """By name, the least recently used first."""
        self.used_bytes = 0
        self.evicted = self.failures = 0
        """Chunks that gave way to others; chunks that could not be read or written."""
        self._rests_until = self._quiet_until = 0.0
        self._closed = False
        # By which all files are named: one that is put in the place of the directory later is another server's.
        self._folder, self._lock = _locked(directory)
        try:
            self._scan()
        except OSError as error:
            self.close()
            raise ConfigError(f"disk_cache {directory}: {error.strerror or error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def write(self, name: str, parts: Parts, still: Callable[[], bool] = lambda: True) -> bool:
        """Keep `parts` under `name`, a name of hexadecimal digits; whether they are. Blocks, and raises nothing.

        `still`: whether they are to be kept, asked at the end; what makes it false comes before `flush`. What cannot be
        kept is not: a cache. A disk that does not work is left alone for QUIET_SECONDS.
        """
        size = HEAD.size + sum(part.nbytes for part in parts)
        with self._mutex:
            if name in self._sizes or size > self._nbytes or time.monotonic() < self._rests_until:
                return name in self._sizes
            self._make_room(size)
        # Of this thread: another one may write the same.
        partial = f"{name}.{threading.get_native_id()}{PARTIAL}"
        try:
            self._write_whole(partial, parts, size)
            with self._mutex:
                if still():
                    os.replace(partial, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                    self.used_bytes += size - self._sizes.pop(name, 0)
                    self._sizes[name] = size
                    self._make_room(0)
                    return True
        except OSError as error:
            self._rests_until = time.monotonic() + QUIET_SECONDS
            self._failed("nothing is written for a minute", error)
        self._unlink(partial)
        return False

    def read(self, name: str, parts: Parts) -> bool:
        """Fill `parts` with what is kept under `name`; whether that was whole. Blocks, and raises nothing.

        What is not whole is given up, and `parts` may hold anything.
        """
        try:
            # Whatever was put there since: no pipe is waited for, and no link followed.
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            self._drop(name)  # it gave way
            return False
        except OSError as error:
            self._failed("a file cannot be read, and is deleted", error)
            self._drop(name)
            return False
        try:
            if _is_whole(descriptor, parts):
                with self._mutex:
                    if name in self._sizes:
                        self._sizes.move_to_end(name)
                # By which the next process knows what was used.
                os.utime(descriptor)
                return True
            self._failed("a file is not whole, and is deleted", OSError(name))
        except OSError as error:
            self._failed("a file cannot be read, and is deleted", error)
        finally:
            os.close(descriptor)
        self._drop(name)
        return False

    def flush(self, tenant: str | None = None) -> int:
        """Delete every chunk, of `tenant` only if given; returns how many. See `write` for what is being written."""
        begin = "" if tenant is None else tenant_digits(tenant)
        with self._mutex:
            names = [name for name in self._sizes if name.startswith(begin)]
        for name in names:
            self._drop(name)
        return len(names)

    def close(self) -> None:
        """Leave the directory to the next process. Idempotent. What threads still do is given up in silence."""
        self._closed = True
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for descriptor in (self._lock, self._folder):
            # Not closed: a thread that still writes would name files by what has that number next.
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)

    def _scan(self) -> None:
        found = list[tuple[float, str, int]]()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                name, rest = entry.name[:LENGTH], entry.name[LENGTH:]
                ours = NAME.fullmatch(name) and (not rest or rest.endswith(PARTIAL))
                if not ours or not entry.is_file(follow_symlinks=False):
                    continue
                told = entry.stat(follow_symlinks=False)
                if name != entry.name or told.st_size > self._nbytes:
                    self._unlink(entry.name)
                else:
                    found.append((told.st_mtime, name, told.st_size))
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
            self._unlink(name)

    def _write_whole(self, name: str, parts: Parts, size: int) -> None:
        head = HEAD.pack(MAGIC, size - HEAD.size, _checksum(parts))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._folder)
        try:
            _written(descriptor, [memoryview(head), *parts])
        finally:
            os.close(descriptor)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def _drop(self, name: str) -> None:
        with self._mutex:
            self.used_bytes -= self._sizes.pop(name, 0)
        self._unlink(name)

    def _failed(self, what: str, error: OSError) -> None:
        now = time.monotonic()
        with self._mutex:
            if self._closed:
                return
            self.failures += 1
            if now < self._quiet_until:
                return
            self._quiet_until = now + QUIET_SECONDS
        log.warning("disk_cache: %s: %s", what, error)


def check_directory(directory: Path) -> None:
    """Raises ConfigError for a directory that a store cannot use now."""
    for descriptor in _locked(directory):
        os.close(descriptor)


def _locked(directory: Path) -> tuple[int, int]:
    """Descriptors of `directory`, which is made if need be, and of its lock. Raises ConfigError."""
    held = list[int]()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        held.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        if os.fstat(held[0]).st_mode & stat.S_IWOTH:
            raise ConfigError(f"disk_cache {directory}: every user of the machine may write there")
        held.append(os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=held[0]))
        try:
            fcntl.flock(held[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"disk_cache {directory}: another server uses it") from None
    except BaseException as error:
        for descriptor in held:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise ConfigError(f"disk_cache {directory}: {error.strerror or error}") from None
        raise
    return held[0], held[1]


def _is_whole(descriptor: int, parts: Parts) -> bool:
    """Whether the file has what fills `parts`, which it then does, and nothing else."""
    size, told = sum(part.nbytes for part in parts), os.fstat(descriptor)
    if not stat.S_ISREG(told.st_mode) or told.st_size != HEAD.size + size:
        return False
    magic, length, checksum = HEAD.unpack(os.read(descriptor, HEAD.size))
    return magic == MAGIC and length == size and _filled(descriptor, parts) and _checksum(parts) == checksum


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
