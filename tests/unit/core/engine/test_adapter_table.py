"""The books of adapters: who is found, who goes first, what the device is told, and that nothing is lost on the way."""

from __future__ import annotations

import random

import pytest
import torch

from core.engine.adapters.table import MAX_LOADED, AdapterTable
from core.errors import AdapterExists, AdapterNotFound, InvalidRequest, Overloaded
from core.invariants import InvariantViolation
from core.models.lora.packed import ALIGN_BYTES, Adapter, Delta, pack

UNIT = 2 * ALIGN_BYTES
"""Bytes of `adapter(1)`."""


def adapter(units: int = 1) -> Adapter:
    one = Delta(torch.zeros(1, ALIGN_BYTES // 4), torch.zeros(ALIGN_BYTES // 4, 1))
    made = pack({f"layer{i}": one for i in range(units)}, pin=False)
    assert made.nbytes == units * UNIT
    return made


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def table(units: int = 3) -> AdapterTable:
    return AdapterTable(units * UNIT, enabled=True, clock=Clock())


def names(books: AdapterTable) -> list[str]:
    return [info.name for info in books.listed().adapters]


def use(books: AdapterTable, name: str) -> int:
    """A request for `name` begins; its slot."""
    slot = books.slot(name)
    books.acquire(slot)
    return slot


def written(books: AdapterTable) -> list[tuple[int, bool]]:
    """(slot, whether it is filled) of the pending writes."""
    return [(write.slot, write.adapter is not None) for write in books.take_writes()]


def test_the_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    books = table(3)
    for name in "abc":
        books.load(name, adapter(), pinned=False)
    books.release(use(books, "a"))
    books.release(use(books, "b"))
    assert books.load("d", adapter(), pinned=False)[1] == ("c",), "never used, loaded before the uses of a and b"
    assert books.load("e", adapter(2), pinned=False)[1] == ("a", "b")
    assert names(books) == ["d", "e"] and books.evictions == 3
    with pytest.raises(AdapterNotFound):
        books.slot("a")
    books.check_integrity()


def test_the_end_of_a_request_is_a_use_too() -> None:
    books = table(2)
    books.load("a", adapter(), pinned=False)
    books.load("b", adapter(), pinned=False)
    long, short = use(books, "a"), use(books, "b")
    books.release(short)
    books.release(long)
    assert books.load("c", adapter(), pinned=False)[1] == ("b",)


def test_what_is_used_or_pinned_stays_and_then_nobody_goes() -> None:
    books = table(3)
    books.load("used", adapter(), pinned=False)
    books.load("pinned", adapter(), pinned=True)
    books.load("free", adapter(), pinned=False)
    slot = use(books, "used")
    with pytest.raises(Overloaded) as full:
        books.load("large", adapter(2), pinned=False)
    assert full.value.reason == "ADAPTER_MEMORY"
    assert names(books) == ["used", "pinned", "free"] and books.evictions == 0
    books.release(slot)
    assert books.load("large", adapter(2), pinned=False)[1] == ("free", "used")
    books.unload("pinned")
    assert names(books) == ["large"]
    with pytest.raises(InvalidRequest, match="path: it needs"):
        books.load("too large", adapter(4), pinned=False)
    with pytest.raises(AdapterExists):
        books.load("large", adapter(), pinned=False)
    books.check_integrity()


def test_an_unloaded_adapter_stays_for_those_who_use_it() -> None:
    books = table(2)
    books.load("a", adapter(), pinned=False)
    first, second = use(books, "a"), use(books, "a")
    books.take_writes()
    assert books.unload("a") == 2
    with pytest.raises(AdapterNotFound):
        books.slot("a")
    with pytest.raises(AdapterNotFound):
        books.unload("a")
    again, _ = books.load("a", adapter(), pinned=False)
    assert again.load_id != first and books.slot("a") == again.load_id
    assert len(books.listed().adapters) == 2, "the old one is there until its requests have ended"
    old, new = books.listed().adapters
    assert (old.name, old.unloading, old.live_requests) == ("a", True, 2) and not new.unloading
    use(books, "a")
    with pytest.raises(Overloaded):
        books.load("b", adapter(), pinned=False)
    books.release(first)
    books.check_integrity()
    assert written(books) == [(again.load_id, True)], "emptied while a request still uses it"
    books.release(second)
    assert written(books) == [(first, False)]
    assert books.used_bytes == UNIT
    with pytest.raises(KeyError):
        books.release(first)
    books.release(again.load_id)
    with pytest.raises(InvariantViolation, match="adapter_users"):
        books.release(again.load_id)


def test_the_device_is_told_in_an_order_that_keeps_to_the_bound() -> None:
    books = table(1)
    a = books.load("a", adapter(), pinned=False)[0].load_id
    assert written(books) == [(a, True)] and written(books) == []
    b = books.load("b", adapter(), pinned=False)[0].load_id
    c = books.load("c", adapter(), pinned=False)[0].load_id
    assert c > b > a
    assert written(books) == [(a, False), (c, True)], "b came and went between two steps"


def test_idle_time_and_facts() -> None:
    clock = Clock()
    books = AdapterTable(10 * UNIT, enabled=True, clock=clock)
    books.load("a", adapter(2), pinned=True)
    (info,) = books.listed().adapters
    assert (info.rank, info.nbytes, info.pinned, info.idle_seconds) == (1, 2 * UNIT, True, None)
    slot = use(books, "a")
    clock.now += 5
    assert books.listed().adapters[0].idle_seconds == 0.0
    books.release(slot)
    clock.now += 7
    assert books.listed().adapters[0].idle_seconds == 7.0
    assert (books.listed().used_bytes, books.listed().max_bytes) == (2 * UNIT, 10 * UNIT)


def test_no_adapter_is_slot_0_and_costs_nothing() -> None:
    books = AdapterTable()
    assert books.slot("") == 0 and books.salt(0, "s") == "s"
    books.acquire(0)
    books.release(0)
    assert table().salt(0, "1\0s") == "0\x001\0s" != table().salt(1, "s")


def test_tiny_adapters_are_bounded_in_number() -> None:
    books = table(MAX_LOADED + 10)
    for number in range(MAX_LOADED):
        books.load(str(number), adapter(), pinned=number > 0)
    assert books.load("one more", adapter(), pinned=True)[1] == ("0",)
    with pytest.raises(Overloaded):
        books.load("and another", adapter(), pinned=False)


class Storm:
    """Random calls beside a model of the same in a few lines; and a device that must never miss what a user needs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.books = table(6)
        self.sizes = {units: adapter(units) for units in (1, 2, 3)}
        self.live: list[int] = []
        self.device: dict[int, int] = {}
        self.seen: set[int] = set()

    def step(self) -> None:
        action, name = self.rng.randrange(5), self.rng.choice("abcdefg")
        if action == 0:
            try:
                info, _ = self.books.load(name, self.sizes[self.rng.choice((1, 2, 3))], pinned=self.rng.random() < 0.1)
            except (AdapterExists, Overloaded):
                return
            assert info.load_id not in self.seen, "a slot was used twice"
            self.seen.add(info.load_id)
        elif action in (1, 2) and name in self.books:
            self.live.append(use(self.books, name))
        elif action == 3 and self.live:
            self.books.release(self.live.pop(self.rng.randrange(len(self.live))))
        elif action == 4 and name in self.books and self.rng.random() < 0.5:
            slot = self.books.slot(name)
            assert self.books.unload(name) == self.live.count(slot)

    def submit(self) -> None:
        """A step of the device: it applies the writes, and needs every slot that a live request has."""
        for write in self.books.take_writes():
            if write.adapter is None:
                del self.device[write.slot]
            else:
                self.device[write.slot] = write.adapter.nbytes
            assert sum(self.device.values()) <= self.books.max_bytes, "in between, the device holds more than it may"
        assert set(self.live) <= self.device.keys()
        assert self.device == {info.load_id: info.nbytes for info in self.books.listed().adapters}


def test_storm(seed: int) -> None:
    print(f"seed {seed}")
    storm = Storm(seed)
    for _ in range(5000):
        storm.step()
        storm.books.check_integrity()
        if storm.rng.random() < 0.3:
            storm.submit()
    while storm.live:
        storm.books.release(storm.live.pop())
    for name in "abcdefg":
        if name in storm.books:
            storm.books.unload(name)
    storm.submit()
    assert storm.books.used_bytes == 0 and not storm.device and storm.books.evictions > 20


def test_an_adapter_that_is_gone_lasts_under_no_name() -> None:
    """Other processes would take its keys for those of the model alone."""
    books = table()
    books.load("one", adapter(), pinned=False)
    slot = books.slot("one")
    assert books.lasting(books.salt(slot, "a\0b")) == f"{books.digest(slot)}\0a\0b"
    assert books.lasting(books.salt(0, "a")) == "\0a" == AdapterTable(UNIT, enabled=False).lasting("a")
    books.unload("one")
    assert books.lasting(books.salt(slot, "a\0b")) is None
