"""Mutants of adapters: whose slot is whose, when one is emptied, and what a prefix has to do with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.engine.adapters.rows import AdapterRows
from core.engine.adapters.table import AdapterTable
from core.models.lora.slots import LORA, NONE_SLOT, LoraWrites, SlotWrite
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.planner import Planner
from core.types.request import Req
from tests.proofs.sim.mutants import Patch, mutant, put


@mutant("kv_read")
def adapters_share_prefixes(patch: Patch) -> None:
    """Keys and values of one are taken for another's."""
    patch.setattr(AdapterTable, "salt", lambda self, slot, salt: salt)


@mutant("adapter_owner")
def who_comes_back_has_no_adapter(patch: Patch) -> None:
    """A retraction forgets it."""

    def admit(old: Any, self: Lifecycle, req: Req, *args: Any) -> bool:
        slot = req.adapter_slot
        if req.retractions:
            req.adapter_slot = 0
        admitted: bool = old(self, req, *args)
        req.adapter_slot = slot
        return admitted

    put(patch, Lifecycle, "admit", admit)


@mutant("adapter_books", "adapter_owner")
def an_adapter_goes_though_it_is_used(patch: Patch) -> None:
    """Unloading does not wait."""

    def unload(old: Any, self: AdapterTable, name: str) -> int:
        loaded = self._by_name.get(name)
        if loaded is None:
            return int(old(self, name))
        users, loaded.users = loaded.users, 0
        old(self, name)
        return users

    put(patch, AdapterTable, "unload", unload)


@mutant("adapter_books")
def an_unloaded_adapter_stays(patch: Patch) -> None:
    """Its last request does not take it along."""

    def release(old: Any, self: AdapterTable, slot: int) -> None:
        loaded = self._by_slot.get(slot)
        unloading = loaded is not None and loaded.unloading
        if loaded is not None:
            loaded.unloading = False
        old(self, slot)
        if loaded is not None:
            loaded.unloading = unloading

    put(patch, AdapterTable, "release", release)


@mutant("adapter_books")
def the_newest_adapter_is_evicted(patch: Patch) -> None:
    """Least recently used, read backwards."""

    def victims(old: Any, self: AdapterTable, nbytes: int) -> Any:
        with _orders_turned(self):
            return old(self, nbytes)

    put(patch, AdapterTable, "_victims", victims)


@contextmanager
def _orders_turned(table: AdapterTable) -> Iterator[None]:
    for loaded in table._by_slot.values():
        loaded.order = -loaded.order
    yield
    for loaded in table._by_slot.values():
        loaded.order = -loaded.order


@mutant("adapter_writes", "adapter_kept")
def emptied_slots_are_not_told(patch: Patch) -> None:
    """The device keeps what nobody counts any more."""

    def writes(old: Any, self: AdapterTable) -> tuple[SlotWrite, ...]:
        return tuple(write for write in old(self) if write.adapter is not None)

    put(patch, AdapterTable, "take_writes", writes)


@mutant("adapter_read", "adapter_kept", "adapter_writes")
def loads_are_told_twice(patch: Patch) -> None:
    """A step repeats what the last one brought."""
    said: dict[int, tuple[SlotWrite, ...]] = {}

    def writes(old: Any, self: AdapterTable) -> tuple[SlotWrite, ...]:
        before, now = said.get(id(self), ()), old(self)
        said[id(self)] = now
        return (*before, *now)

    put(patch, AdapterTable, "take_writes", writes)


@mutant("adapter_read", "tokens")
def decodes_run_on_the_base_model(patch: Patch) -> None:
    """Only the prompt has its adapter."""

    def planned(old: Any, self: AdapterRows, rows: Any, starts: Any, lens: Any, *rest: Any) -> Any:
        kept = self._slots.copy()
        self._slots[rows[lens == 1]] = 0
        writes = old(self, rows, starts, lens, *rest)
        self._slots = kept
        return writes

    put(patch, AdapterRows, "planned", planned)


@mutant("adapter_read", "tokens", "kv_read")
def a_step_has_one_adapter(patch: Patch) -> None:
    """The lowest slot stands for all."""

    def frozen(old: Any, self: Planner, *args: Any) -> ScheduleBatch:
        batch: ScheduleBatch = old(self, *args)
        told: LoraWrites | None = batch.companion_writes.get(LORA)
        if told is not None and len(told.groups) > 1:
            slot = told.groups[0][0]
            groups = tuple((slot, places) for _, places in told.groups)
            rows = np.where(told.row_slots, slot, NONE_SLOT)
            batch.companion_writes[LORA] = LoraWrites(told.slots, groups, told.num_tokens, rows)  # type: ignore[index]
        return batch

    put(patch, Planner, "_freeze", frozen)


@mutant("entry")
def unknown_adapters_are_the_base_model(patch: Patch) -> None:
    """Instead of a refusal."""
    put(patch, AdapterTable, "slot", lambda old, self, name: old(self, name if name in self else ""))


@mutant("adapter_kept")
def loads_of_a_step_are_alike(patch: Patch) -> None:
    """The last of them fills every slot."""

    def writes(old: Any, self: AdapterTable) -> tuple[SlotWrite, ...]:
        found: tuple[SlotWrite, ...] = old(self)
        full = [write.adapter for write in found if write.adapter is not None]
        return tuple(write if write.adapter is None else SlotWrite(write.slot, full[-1]) for write in found)

    put(patch, AdapterTable, "take_writes", writes)


@mutant("adapter_read", drafts=True)
def drafts_run_on_the_adapter_of_the_row_before(patch: Patch) -> None:
    """Rows are told in another order than that of the batch."""

    def planned(old: Any, self: AdapterRows, *args: Any) -> Any:
        told: LoraWrites | None = old(self, *args)
        return (
            None if told is None else LoraWrites(told.slots, told.groups, told.num_tokens, np.roll(told.row_slots, 1))
        )

    put(patch, AdapterRows, "planned", planned)
