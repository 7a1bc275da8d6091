"""What operators do with adapters while requests run: loads, unloads, and who goes when room runs out.

Held against books of its own, a few lines that look for the oldest each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, cast

from core.engine.adapters.table import AdapterTable
from core.errors import AdapterExists, AdapterNotFound, InvalidRequest, Overloaded, SlipstreamError
from core.types.request import Req
from tests.proofs.sim.adapters import Weights
from tests.proofs.sim.reference import BASE
from tests.proofs.sim.scenario import Adapters
from tests.proofs.sim.story import Hits, Story, Violation

NAMES = ("red", "green", "blue", "grey")
NO_ADAPTER = 0.2
"""Share of requests for the base model alone."""

WITHDRAWN = 0.5
"""Share of unloads after which the clients of that adapter leave."""


@dataclass(slots=True)
class Entry:
    """An adapter that holds memory."""

    name: str
    slot: int
    content: int
    nbytes: int
    pinned: bool
    used: int
    """When it was loaded, or used last."""
    users: int = 0
    unloading: bool = False


class AdapterInputs:
    """Draws what happens to the table, and knows what it must answer."""

    def __init__(self, drawn: Adapters, table: AdapterTable, rng: random.Random, story: Story, hits: Hits) -> None:
        self._drawn, self._table, self._rng = drawn, table, rng
        self._story, self._hits = story, hits
        self._entries: list[Entry] = []
        self._moment = 0
        self._loads = 0

    def before_step(self) -> int | None:
        """A load, an unload, or neither. A slot is returned when its adapter was withdrawn from all who use it."""
        if self._rng.random() < self._drawn.load_rate:
            self._load(NAMES[int(self._rng.random() * len(NAMES))])
        if self._rng.random() < self._drawn.unload_rate:
            return self._unload(self._name())
        return None

    def wanted(self) -> str:
        """Which adapter a request asks for; nobody may have loaded it."""
        if self._rng.random() < NO_ADAPTER:
            return ""
        return self._name()

    def known(self, name: str) -> bool:
        """Whether the door must let a request for `name` in."""
        return not name or self._find(name) is not None

    def enter(self, name: str, reqs: list[Req]) -> int:
        """The engine takes the slot for a stream of `reqs`; what its adapter does."""
        entry = self._find(name)
        slot = 0 if entry is None else entry.slot
        if any(req.adapter_slot != slot for req in reqs):
            raise Violation("adapter_books", f"{name!r} is in slot {slot}, the door says {reqs[0].adapter_slot}")
        self._table.acquire(slot)
        if entry is None:
            return BASE
        entry.users += 1
        self._touch(entry)
        self._compare()
        return entry.content

    def closed(self, slot: int) -> None:
        """A stream for `slot` has ended, with all its samples."""
        self._table.release(slot)
        for entry in self._entries:
            if entry.slot == slot:
                entry.users -= 1
                self._touch(entry)
        self._forget_unloaded()
        self._compare()

    def when_empty(self) -> None:
        """Nobody is left, so nobody uses any."""
        if any(entry.users or entry.unloading for entry in self._table._by_slot.values()):
            raise Violation("adapter_books", f"everybody left, but {self._table.listed()} are in use")

    def _name(self) -> str:
        """Mostly of one that is loaded."""
        loaded = [entry.name for entry in self._entries if not entry.unloading]
        names = loaded if loaded and self._rng.random() < 0.8 else NAMES
        return names[int(self._rng.random() * len(names))]

    def _load(self, name: str) -> None:
        nbytes = 1 + int(self._rng.random() * self._drawn.room * 0.7)
        if self._rng.random() < 0.03:
            nbytes = self._drawn.room + 1
        pinned = self._rng.random() < 0.03
        victims, refusal = self._expected(name, nbytes)
        self._loads += 1
        try:
            info, evicted = self._table.load(name, cast(Any, Weights(self._loads, nbytes)), pinned=pinned)
        except SlipstreamError as error:
            if type(error) is not refusal:
                raise Violation("adapter_books", f"load of {name}, {nbytes} bytes: {error!r}, not {refusal}") from error
            self._hits(f"adapter_{refusal.__name__}")
            self._compare()
            return
        if refusal is not None or evicted != tuple(entry.name for entry in victims):
            text = f"load of {name}, {nbytes} bytes: {evicted} went, expected {refusal or victims}"
            raise Violation("adapter_books", text)
        self._entries = [entry for entry in self._entries if entry not in victims]
        self._entries.append(Entry(name, info.load_id, self._loads, nbytes, pinned, 0))
        self._touch(self._entries[-1])
        self._hits("adapter_evicted" if evicted else "adapter_loaded")
        self._story.note(f"load of {name} into slot {info.load_id}, {nbytes} bytes, evicted {evicted}")
        self._compare()

    def _expected(self, name: str, nbytes: int) -> tuple[list[Entry], type[SlipstreamError] | None]:
        """Who must go for a load, oldest first, or how it must be refused."""
        if self._find(name) is not None:
            return [], AdapterExists
        if nbytes > self._drawn.room:
            return [], InvalidRequest
        free = self._drawn.room - sum(entry.nbytes for entry in self._entries)
        idle = [entry for entry in self._entries if not (entry.users or entry.pinned or entry.unloading)]
        victims: list[Entry] = []
        while free < nbytes and idle:
            victims.append(min(idle, key=lambda entry: entry.used))
            idle.remove(victims[-1])
            free += victims[-1].nbytes
        return (victims, None) if free >= nbytes else ([], Overloaded)

    def _unload(self, name: str) -> int | None:
        entry = self._find(name)
        try:
            left = self._table.unload(name)
        except AdapterNotFound as error:
            if entry is not None:
                raise Violation("adapter_books", f"unload of {name}, which is loaded: {error!r}") from error
            self._hits("adapter_AdapterNotFound")
            return None
        if entry is None or left != entry.users:
            raise Violation("adapter_books", f"unload of {name}: {left} use it, expected {entry}")
        entry.unloading = True
        self._hits("adapter_unloaded_in_use" if left else "adapter_unloaded")
        self._story.note(f"unload of {name} from slot {entry.slot}, {left} use it")
        self._forget_unloaded()
        self._compare()
        return entry.slot if left and self._rng.random() < WITHDRAWN else None

    def _find(self, name: str) -> Entry | None:
        return next((entry for entry in self._entries if entry.name == name and not entry.unloading), None)

    def _touch(self, entry: Entry) -> None:
        self._moment += 1
        entry.used = self._moment

    def _forget_unloaded(self) -> None:
        self._entries = [entry for entry in self._entries if entry.users or not entry.unloading]

    def _compare(self) -> None:
        """The table says what these books say."""
        listed = self._table.listed()
        told = [(i.name, i.load_id, i.nbytes, i.pinned, i.live_requests, i.unloading) for i in listed.adapters]
        ours = [(e.name, e.slot, e.nbytes, e.pinned, e.users, e.unloading) for e in self._entries]
        if told != ours or listed.used_bytes != sum(entry.nbytes for entry in self._entries):
            raise Violation("adapter_books", f"the table says {told}, expected {ours}")
        if len({entry.slot for entry in self._entries}) != len(self._entries):
            raise Violation("adapter_books", f"two loads in one slot: {ours}")
