"""LoRA adapters as the engine's API describes them: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One adapter that holds memory. A name may be there twice while the older one waits for its last request."""

    name: str
    load_id: int
    """Unique among all loads of one engine, also of the same name. Cached prefixes are kept apart by it."""
    rank: int
    """The highest rank of any of its modules."""
    nbytes: int
    """Bytes that it takes on the device."""
    pinned: bool
    """Never evicted; it can still be unloaded."""
    unloading: bool
    """Unloaded: new requests do not find it, and its memory is freed when the last request that uses it ends."""
    live_requests: int
    idle_seconds: float | None
    """Seconds since a request last used it, 0 while one does; None if none ever did."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """What a load did: the new adapter, and the names that were evicted for it, least recently used first."""

    adapter: AdapterInfo
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterList:
    """All adapters in the order of loading, the device bytes that they take, and the limit of those bytes."""

    adapters: tuple[AdapterInfo, ...]
    used_bytes: int
    max_bytes: int
