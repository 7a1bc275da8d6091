"""LoRA adapters as the engine's door shows them: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One adapter that holds memory. A name may be there twice while the older one waits for its last request."""

    name: str
    load_id: int
    """Differs between any two loads of one engine, of the same name too: cached prefixes go by it."""
    rank: int
    """The highest of any module."""
    nbytes: int
    """What it takes on the device."""
    pinned: bool
    """Never evicted; it can still be unloaded."""
    unloading: bool
    """Taken out: new requests do not find it, and it goes with the last of those that use it."""
    live_requests: int
    idle_seconds: float | None
    """Since a request last used it, 0 while one does; None if none ever did."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """What a load did: the new adapter, and the names that were evicted for it, least recently used first."""

    adapter: AdapterInfo
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterList:
    """All adapters in order of their loading, and the bytes that they take of those that they may."""

    adapters: tuple[AdapterInfo, ...]
    used_bytes: int
    max_bytes: int
