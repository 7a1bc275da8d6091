"""LoRA adapters under simulation: the production books, and slots in plain integers that the steps fill and empty.

What an adapter does to a model is a number: the hash of a row's first token starts from it, so that keys and values of
one adapter are wrong for every other, and each step blends it into the next token. A row that meets another's adapter,
an empty slot, or a prefix that another adapter computed, is found by the step that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.engine.adapters.rows import AdapterRows
from core.engine.adapters.table import AdapterTable
from core.memory.request_memory import RequestMemory
from core.models.lora.packed import Adapter
from core.models.lora.slots import LORA, NONE_SLOT, LoraWrites
from core.scheduler.running import RunningSet
from core.types.adapters import AdapterInfo
from core.types.request import Req
from tests.proofs.sim.companions import CompanionSide, Owner
from tests.proofs.sim.kv_memory import KVMemory, Table
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.reference import BASE, root
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Violation


@dataclass(frozen=True, slots=True)
class Weights:
    """As much of a `core.models.lora.packed.Adapter` as the books look at, and the number that stands for the rest."""

    content: int
    nbytes: int
    rank: int = 1
    digest: str = ""


@dataclass(slots=True)
class AdaptersLeft:
    """What the host knew when it submitted a batch."""

    contents: dict[int, int]
    """By slot: what the device has there once the batch was executed."""
    named: set[int]
    """Slots of the batch's tokens."""


class AdapterTwin(CompanionSide):
    """Slots as a dictionary."""

    def __init__(self, scenario: Scenario, hits: Hits) -> None:
        assert scenario.adapters is not None, "a scenario without adapters has no such side"
        self.table = AdapterTable(scenario.adapters.room, enabled=True, clock=lambda: 0.0)
        self.host = AdapterRows(self.table, scenario.rows + 1)
        self._hits = hits
        self._contents: dict[int, int] = {}
        """By slot: what the host loaded into it, ever."""
        self._filled: dict[int, int] = {}
        self._began: dict[int, int] = {}
        """By row: what its owner began with."""
        self._said: list[int] = []
        self._plain: Plain | None = None
        self._watch()

    def _watch(self) -> None:
        load = self.table.load

        def loaded(name: str, adapter: Adapter, *, pinned: bool) -> tuple[AdapterInfo, tuple[str, ...]]:
            info, evicted = load(name, adapter, pinned=pinned)
            assert isinstance(adapter, Weights)
            self._contents[info.load_id] = adapter.content
            return info, evicted

        self.table.load = loaded  # type: ignore[method-assign]

    def check(self, memory: RequestMemory, running: RunningSet, seats: Sequence[Req]) -> None:
        """Who runs has the slot that it came with, and that slot is held."""
        self.table.check_integrity()
        for req in seats:
            slot = int(self.host.slots_of(np.array([req.row]))[0])
            if slot != req.adapter_slot or (slot != NONE_SLOT and slot not in self.table._by_slot):
                text = f"{req.sink.name} came for slot {req.adapter_slot} and runs with {slot}: {self.table.listed()}"
                raise Violation("adapter_owner", text)

    def leave(self, batch: ScheduleBatch, flying: Sequence[AdaptersLeft]) -> AdaptersLeft:
        """See `CompanionSide`."""
        writes: LoraWrites = batch.companion_writes.get(LORA, LoraWrites())
        named = {slot for slot, _ in writes.groups}
        emptied = {write.slot for write in writes.slots if write.adapter is None}
        if any(not emptied.isdisjoint(left.named) for left in flying):
            self._hits("adapter_emptied_in_flight")
        if len(named) > 1:
            self._hits("adapters_mixed")
        return AdaptersLeft({slot: self._contents[slot] for slot in self.table._by_slot}, named)

    def told(self, batch: ScheduleBatch) -> str:
        """See `CompanionSide`."""
        writes: LoraWrites | None = batch.companion_writes.get(LORA)
        if writes is None:
            return ""
        changes = [f"slot {write.slot} {'emptied' if write.adapter is None else 'filled'}" for write in writes.slots]
        groups = [f"slot {slot} for tokens {places.tolist()}" for slot, places in writes.groups]
        return f"adapters: {', '.join(changes + groups)}"

    def take_back(self, owners: Sequence[Owner], left: AdaptersLeft) -> None:
        """See `CompanionSide`."""
        for row, _ in owners:
            self._began.pop(row, None)

    def check_writes(self, plain: Plain, writes: LoraWrites | None) -> None:
        """Slots are filled once and emptied once; every token is in one group at most."""
        self._plain = plain
        if writes is None:
            return
        filled = set(self._filled)
        for write in writes.slots:
            if write.slot <= NONE_SLOT or (write.slot in filled) != (write.adapter is None):
                raise Violation("adapter_writes", f"step {plain.step_id} writes {write}, filled are {filled}")
            (filled.remove if write.adapter is None else filled.add)(write.slot)
        places = [place for _, places in writes.groups for place in places.tolist()]
        tokens = sum(plain.lens)
        if len(set(places)) != len(places) or not set(places) <= set(range(tokens)):
            raise Violation("adapter_writes", f"step {plain.step_id} of {tokens} tokens has groups of {places}")

    def begin(self, writes: LoraWrites | None) -> None:
        """See `CompanionSide`."""
        assert self._plain is not None, "checked before"
        plain, tokens = self._plain, sum(self._plain.lens)
        slots = [NONE_SLOT] * tokens
        for write in writes.slots if writes else ():
            self._filled.pop(write.slot, None)
            if isinstance(write.adapter, Weights):
                self._filled[write.slot] = write.adapter.content
        if writes is not None and writes.groups and tokens > writes.num_tokens:
            self._hits("adapter_drafts")
            slots = np.repeat(writes.row_slots, plain.lens).tolist()
        else:
            for slot, places in writes.groups if writes else ():
                for place in places.tolist():
                    slots[place] = slot
        self._said, at = [], 0
        for row, length in zip(plain.rows, plain.lens, strict=True):
            self._said.append(self._content(row, set(slots[at : at + length])))
            at += length

    def _content(self, row: int, slots: set[int]) -> int:
        """Of the adapter that all tokens of `row` have, which must be the one that it began with."""
        found = {BASE if slot == NONE_SLOT else self._filled.get(slot) for slot in slots}
        content = found.pop()
        if found or content is None or self._began.setdefault(row, content) != content:
            text = f"row {row} has slots {slots} of {self._filled}, and began with {self._began.get(row)}"
            raise Violation("adapter_read", text)
        return content

    def roots(self, plain: Plain) -> list[int]:
        """See `CompanionSide`."""
        return list(map(root, self._said))

    def run(self, plain: Plain, ids: list[int], tables: list[Table], kv: KVMemory) -> list[int]:
        """See `CompanionSide`."""
        if not plain.verifies:
            return self._said
        return [said for said, length in zip(self._said, plain.lens, strict=True) for _ in range(length)]

    def look_back(self, kv: KVMemory, left: AdaptersLeft) -> None:
        """See `CompanionSide`."""
        if self._filled != left.contents:
            raise Violation("adapter_kept", f"the device has {self._filled}, the host {left.contents}")
