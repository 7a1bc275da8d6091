"""What waits to be written while a tenant's prefixes are given up: only that tenant's is not kept."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.memory.host_prefixes import HostPrefixes
from core.memory.host_tier import HostTier
from core.scheduler.disk_prefixes import DiskPrefixes
from core.scheduler.file_names import Lasting

CHUNK, BLOCK = 4, 32


class Store:
    """Keeps names once it is let go, as far as they are to be kept still."""

    used_bytes = evicted = failures = 0

    def __init__(self) -> None:
        self.go, self.names = threading.Event(), list[str]()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def write(self, name: str, parts: Any, still: Any) -> bool:
        assert self.go.wait(20)
        self.names += [name] if still() else []
        return bool(still())

    def flush(self, tenant: str | None) -> None:
        self.names.clear()

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(("flushed", "kept"), [("a", {"b"}), ("b", {"a"}), (None, set())])
def test_a_flush_of_one_tenant_leaves_the_writes_of_others(flushed: str | None, kept: set[str]) -> None:
    prefixes = HostPrefixes(HostTier(32 * BLOCK, 8, BLOCK), CHUNK, of=lambda salt: salt)
    store, outgoing, woken = Store(), SimpleNamespace(views=lambda copy: []), threading.Semaphore(0)
    lasting = Lasting("stamp", lambda salt: salt, lambda salt: salt)
    disk = DiskPrefixes(store, prefixes, outgoing, lasting, woken.release)  # type: ignore[arg-type]  # stand-ins
    prompt = np.arange(2 * CHUNK)
    for salt in ("a", "b"):
        start, copies = prefixes.extend(prompt, salt)
        landed = disk.keep(prompt, salt, start, copies)
        assert landed is not None and not disk.is_idle
        landed()
    disk.flush(flushed)
    prefixes.flush(flushed)
    store.go.set()
    for _ in range(2):
        assert woken.acquire(timeout=20)
    assert disk.settle() and disk.is_idle
    assert disk.kept == 2 * CHUNK * len(kept) and len(store.names) == 2 * len(kept)
    # Nor is anything left in host memory of what the writes had held.
    assert {salt for salt in ("a", "b") if prefixes.peek(prompt, 8, salt)} == kept
    disk.close()
