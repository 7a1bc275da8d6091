"""The loaded adapters: names, slots, bytes, users and the order of eviction. Host state of the loop thread.

The number of a slot is never used twice, so it tells one load of a name from the next. A step can only name weights
that were there when its request came, and the prefix cache keeps keys and values apart by slot. A change reaches the
device with the writes of the next step (law 2). Steps run in the order of their submission (law 4), so a slot may be
emptied as soon as no request uses it: every step that names it was submitted before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import AdapterExists, AdapterNotFound, InvalidRequest, Overloaded
from core.invariants import check
from core.models.lora.packed import Adapter
from core.models.lora.slots import NONE_SLOT, SlotWrite
from core.prefix.tenants import tenant_of
from core.types.adapters import AdapterInfo, AdapterList

MAX_LOADED = 1024
"""Adapters loaded at once, however small they are."""

ADAPTER_MEMORY = "ADAPTER_MEMORY"
"""The `reason` of Overloaded when no room can be made for an adapter."""


@dataclass(slots=True, eq=False)
class _Loaded:
    """One adapter that holds memory."""

    name: str
    slot: int
    rank: int
    nbytes: int
    pinned: bool
    users: int = 0
    """Requests that have entered with it and not ended."""
    unloading: bool = False
    """Whether no new request finds it; it is freed with its last user."""
    used_at: float | None = None
    """`time.monotonic` seconds when a request last began or ended to use it; None before the first."""
    digest: str = ""
    """Of its weights."""
    order: int = 0
    """Number of its last use, or of its load while there was none: the lowest is the least recently used."""

    @property
    def evictable(self) -> bool:
        """Whether no request uses it, and it is neither pinned nor about to be freed."""
        return not (self.users or self.pinned or self.unloading)


class AdapterTable:
    """The loaded adapters, by name and by slot. Every change is synchronous, and happens as a whole or not at all.

    `max_bytes`: of all adapters together. `enabled`: whether there can be adapters at all.
    """

    def __init__(
        self, max_bytes: int = 0, *, enabled: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self.enabled = enabled
        self.used_bytes = 0
        self.evictions = 0
        self._clock = clock
        self._by_name: dict[str, _Loaded] = {}
        """Adapters that requests can ask for."""
        self._by_slot: dict[int, _Loaded] = {}
        """All adapters that hold memory, in the order of their loading."""
        self._pending: dict[int, SlotWrite] = {}
        """Slot -> the write that the device does not know yet."""
        self._last_slot = NONE_SLOT
        self._uses = 0

    def __len__(self) -> int:
        return len(self._by_slot)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def slot(self, name: str) -> int:
        """Slot of the adapter `name`; `NONE_SLOT` for the empty name. Raises AdapterNotFound."""
        if not name:
            return NONE_SLOT
        found = self._by_name.get(name)
        if found is None:
            raise AdapterNotFound("no adapter of this name is loaded; it may have been unloaded or evicted")
        return found.slot

    def name(self, slot: int) -> str:
        """Name of the adapter in `slot`, which a request uses; empty for `NONE_SLOT`."""
        return "" if slot == NONE_SLOT else self._by_slot[slot].name

    def digest(self, slot: int) -> str:
        """Of the weights of the adapter in `slot`, which may be on other machines too; empty for `NONE_SLOT`."""
        return "" if slot == NONE_SLOT else self._by_slot[slot].digest

    def salt(self, slot: int, salt: str) -> str:
        """The prefix-cache salt of requests for `slot` that have `salt`: KV of one adapter is wrong for every other.

        The first NUL ends the number of the slot, whatever `salt` holds.
        """
        return f"{slot}\0{salt}" if self.enabled else salt

    def lasting(self, salt: str) -> str | None:
        """What other processes, with slots of their own, call what the method `salt` returned; None for a slot of none.

        The digest of the adapter's weights, empty for none, and behind a NUL the request's own salt.
        """
        slot, _, own = salt.partition("\0") if self.enabled else (str(NONE_SLOT), "", salt)
        loaded = self._by_slot.get(int(slot))
        if loaded is None and int(slot) != NONE_SLOT:
            return None
        return f"{'' if loaded is None else loaded.digest}\0{own}"

    def tenant(self, salt: str) -> str:
        """The tenant in what the method `salt` returned: the part of the request's own salt before its first NUL."""
        return tenant_of(salt.partition("\0")[2] if self.enabled else salt)

    def acquire(self, slot: int) -> None:
        """Count one more user of `slot`.

        Call it in the same turn of the event loop as `slot(name)`: an await in between would allow an eviction.
        """
        if slot != NONE_SLOT:
            loaded = self._by_slot[slot]
            loaded.users += 1
            self._touch(loaded)

    def release(self, slot: int) -> None:
        """Count one user of `slot` less: its request has ended, and no step that is planned later names `slot` for it.

        An adapter that is unloading is freed with its last user.
        """
        if slot == NONE_SLOT:
            return
        loaded = self._by_slot[slot]
        check("adapter_users", loaded.users > 0, slot=slot, users=loaded.users)
        loaded.users -= 1
        self._touch(loaded)
        if loaded.unloading and not loaded.users:
            self._free(loaded)

    def refuse_name(self, name: str) -> None:
        """Raises AdapterExists when requests can ask for `name` already."""
        if name in self._by_name:
            raise AdapterExists("an adapter of this name is loaded; unload it first")

    def load(self, name: str, adapter: Adapter, *, pinned: bool) -> tuple[AdapterInfo, tuple[str, ...]]:
        """Take `adapter` in as `name`; returns its info, and the names of the adapters that were evicted for it.

        Raises AdapterExists; InvalidRequest when even the empty table could not hold it; Overloaded when evicting all
        that may be evicted would not make enough room, and then none is.
        """
        self.refuse_name(name)
        if adapter.nbytes > self.max_bytes:
            told = f"it needs {adapter.nbytes} bytes on the device, and all adapters together may have {self.max_bytes}"
            raise InvalidRequest.of("path", told)
        victims = self._victims(adapter.nbytes)
        for victim in victims:
            del self._by_name[victim.name]
            self._free(victim)
            self.evictions += 1
        self._last_slot += 1
        loaded = _Loaded(name, self._last_slot, adapter.rank, adapter.nbytes, pinned, digest=adapter.digest)
        self._by_name[name] = self._by_slot[loaded.slot] = loaded
        self.used_bytes += loaded.nbytes
        self._pending[loaded.slot] = SlotWrite(loaded.slot, adapter)
        self._order(loaded)
        check("adapter_bytes", self.used_bytes <= self.max_bytes, used=self.used_bytes, most=self.max_bytes)
        return self._info(loaded), tuple(victim.name for victim in victims)

    def unload(self, name: str) -> int:
        """Let no new request find `name`; returns how many still use it. It is freed with the last of them.

        Raises AdapterNotFound.
        """
        loaded = self._by_name.pop(name, None)
        if loaded is None:
            raise AdapterNotFound("no adapter of this name is loaded")
        loaded.unloading = True
        if not loaded.users:
            self._free(loaded)
        return loaded.users

    def listed(self) -> AdapterList:
        """Every adapter that holds memory, the bytes that they hold, and how many they may."""
        return AdapterList(tuple(map(self._info, self._by_slot.values())), self.used_bytes, self.max_bytes)

    def take_writes(self) -> tuple[SlotWrite, ...]:
        """Changes since the last call, for the very next step: slots to empty first, then slots to fill."""
        if not self._pending:
            return ()
        writes, self._pending = list(self._pending.values()), {}
        return tuple(sorted(writes, key=lambda write: write.adapter is not None))

    def check_integrity(self) -> None:
        """Recount bytes and users; raises InvariantViolation naming what is off."""
        total = sum(loaded.nbytes for loaded in self._by_slot.values())
        check("adapter_bytes", total == self.used_bytes <= self.max_bytes, counted=total, kept=self.used_bytes)
        for slot, loaded in self._by_slot.items():
            kept = loaded.users > 0 if loaded.unloading else self._by_name.get(loaded.name) is loaded
            check("adapter_users", kept, slot=slot, users=loaded.users, unloading=loaded.unloading)

    def _victims(self, nbytes: int) -> list[_Loaded]:
        """The least recently used adapters that must go for `nbytes` more. Raises Overloaded when too few may go."""
        short = self.used_bytes + nbytes - self.max_bytes
        too_many = len(self._by_slot) + 1 - MAX_LOADED
        victims: list[_Loaded] = []
        for loaded in sorted(self._by_slot.values(), key=lambda loaded: loaded.order):
            if short <= 0 and too_many <= 0:
                break
            if loaded.evictable:
                victims.append(loaded)
                short -= loaded.nbytes
                too_many -= 1
        if short > 0 or too_many > 0:
            raise Overloaded("adapters that are in use or pinned take all the room there is", reason=ADAPTER_MEMORY)
        return victims

    def _free(self, loaded: _Loaded) -> None:
        check("adapter_users", loaded.users == 0, slot=loaded.slot, users=loaded.users)
        del self._by_slot[loaded.slot]
        self.used_bytes -= loaded.nbytes
        # A fill that the device has not heard of needs no undoing: it is dropped.
        if self._pending.pop(loaded.slot, None) is None:
            self._pending[loaded.slot] = SlotWrite(loaded.slot, None)

    def _touch(self, loaded: _Loaded) -> None:
        loaded.used_at = self._clock()
        self._order(loaded)

    def _order(self, loaded: _Loaded) -> None:
        self._uses += 1
        loaded.order = self._uses

    def _info(self, loaded: _Loaded) -> AdapterInfo:
        idle = None if loaded.used_at is None else 0.0 if loaded.users else max(0.0, self._clock() - loaded.used_at)
        return AdapterInfo(
            name=loaded.name,
            load_id=loaded.slot,
            rank=loaded.rank,
            nbytes=loaded.nbytes,
            pinned=loaded.pinned,
            unloading=loaded.unloading,
            live_requests=loaded.users,
            idle_seconds=idle,
        )
