"""Cross pages: taken whole at admission or not at all, told to the device in one step, given back once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.device.staging import Staging
from core.invariants import InvariantViolation
from core.memory.companion import AdmissionFacts
from core.memory.cross.cross_pages import NO_PAGES, CrossPages, CrossWrites
from core.memory.cross.cross_pool import CrossPool
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.prefix.registry import build_prefix_cache
from core.types.arrays import Ints

CPU = torch.device("cpu")
PAGE = 4
ROWS, PAGES, LONGEST = 5, 20, 24
STEPS = 400


def ids(count: int) -> Ints:
    return np.arange(count, dtype=np.int64)


def make(pages: int = PAGES, kv_pages: int = 12) -> tuple[CrossPages, RequestMemory]:
    cross = CrossPages(pages, PAGE, ROWS + 1)
    cache = build_prefix_cache("none", PAGE)
    return cross, RequestMemory(RowAllocator(ROWS), PagedKVAllocator(kv_pages, PAGE), cache, 64, [cross])


def plan(memory: RequestMemory, rows: list[int], extend: list[int] | None = None) -> CrossWrites:
    lens = np.array(extend or [1] * len(rows))
    writes: CrossWrites = memory.plan_companions(np.array(rows), np.zeros(len(rows), np.int64), lens)["cross_page"]
    return writes


def test_both_or_neither() -> None:
    cross, memory = make(pages=5)
    first = memory.admit(ids(1), "", 0, usable=lambda _: 0, encoder_tokens=13)
    assert first is not None and cross.allocator.held == 4
    assert memory.admit(ids(1), "", 0, usable=lambda _: 0, encoder_tokens=5) is None
    assert (memory.rows.used, memory.allocator.held, cross.allocator.held) == (1, 1, 4)
    assert memory.admit(ids(1), "", 0, usable=lambda _: 0, encoder_tokens=4) is not None
    memory.release(first.row, first.generation, ids(0))
    assert cross.allocator.available == 4
    memory.check_integrity()


def test_no_cross_page_is_taken_when_decoder_pages_do_not_suffice() -> None:
    cross, memory = make(kv_pages=2)
    assert memory.admit(ids(9), "", 0, usable=lambda _: 0, encoder_tokens=4) is None
    assert cross.allocator.held == 0
    memory.check_integrity()


def test_entry_asks_each_pool_for_its_own_tokens() -> None:
    _, memory = make(pages=3, kv_pages=2)
    assert memory.fits_alone(8, 12) and not memory.fits_alone(9, 12) and not memory.fits_alone(8, 13)


def test_a_padded_row_reads_slot_0_and_owns_nothing() -> None:
    cross, memory = make()
    writes = plan(memory, [0, 0], [1, 1])
    assert writes.last_places.tolist() == [0, 0] and len(writes.rows) == 0
    with pytest.raises(InvariantViolation, match="row_padding_reserved"):
        cross.admitted(0, AdmissionFacts(1, NO_PAGES, 0, 4))
    with pytest.raises(InvariantViolation, match="cross_page_double_free"):
        cross.released(0)


def test_what_nobody_encodes_is_seen() -> None:
    cross, memory = make()
    with pytest.raises(InvariantViolation, match="cross_row_encoded"):
        plan(memory, [1])
    with pytest.raises(InvariantViolation, match="cross_row_encoded"):
        cross.admitted(1, AdmissionFacts(1, NO_PAGES, 0, 0))
    for row in (1, 2):
        cross.admitted(row, AdmissionFacts(1, NO_PAGES, 0, 3))
    with pytest.raises(InvariantViolation, match="cross_row_encoded"):
        plan(memory, [2])


def test_pages_go_back_once_and_belong_to_one_row() -> None:
    cross, _ = make()
    cross.admitted(1, AdmissionFacts(1, NO_PAGES, 0, 5))
    with pytest.raises(InvariantViolation, match="cross_page_conservation"):
        cross.admitted(1, AdmissionFacts(1, NO_PAGES, 0, 5))
    cross.admitted(2, AdmissionFacts(1, NO_PAGES, 0, 5))
    cross.released(1)
    with pytest.raises(InvariantViolation, match="cross_page_double_free"):
        cross.released(1)
    cross._pages[2] = np.append(cross._pages[2], 20)
    with pytest.raises(InvariantViolation, match="cross_page_conservation"):
        cross.check_integrity()


def test_the_device_agrees_with_a_dictionary(seed: int) -> None:
    """Admissions, mixed steps, ends before and after a step, at random; every token reads its own request's input."""
    print(f"seed {seed}")
    draw = np.random.default_rng(seed)
    cross, memory = make()
    requests = ReqToTokenPool(ROWS, 64, CPU)
    pool = KVPool([KVLayerSpec(0, 1, 1, 1)], PAGES, PAGE, torch.float32, CPU)
    device = CrossPool(requests, pool, LONGEST)
    held: dict[int, tuple[int, torch.Tensor]] = {}
    """By row: its generation, and the keys that its encoder left."""
    fresh: dict[int, torch.Tensor] = {}
    refused = ended_unplanned = 0
    for _ in range(STEPS):
        for _ in range(draw.integers(0, 3)):
            length = int(draw.integers(1, LONGEST + 1))
            taken = memory.admit(ids(1), "", 0, usable=lambda _: 0, encoder_tokens=length)
            short = memory.rows.available == 0 or cross.allocator.available < -(-length // PAGE)
            assert taken is not None or short, "refused although there was room"
            refused += taken is None
            if taken is not None:
                fresh[taken.row] = torch.from_numpy(draw.normal(size=(length, 1, 1))).float()
                held[taken.row] = taken.generation, fresh[taken.row]
        for row in [row for row in held if draw.random() < 0.2]:
            memory.release(row, held.pop(row)[0], ids(0))
            ended_unplanned += fresh.pop(row, None) is not None
        memory.check_integrity()
        assert cross.allocator.held == sum(-(-len(keys) // PAGE) for _, keys in held.values())
        rows = [0, *(row for row in held if row in fresh or draw.random() < 0.7)]
        draw.shuffle(rows)
        extend = [int(draw.integers(1, 4)) if row in fresh else 1 for row in rows]
        writes = plan(memory, rows, extend)
        device.begin(torch.tensor(rows), writes, Staging(CPU))
        if order := [row for row in rows if row in fresh]:
            keys = torch.cat([fresh.pop(row) for row in order])
            pool.write(0, device.input_slots, keys, keys)
        assert device.token_rows.tolist() == np.repeat(rows, extend).tolist()
        for row, last in zip(device.token_rows.tolist(), device.last_places.tolist(), strict=True):
            want = held[row][1] if row else torch.zeros(1, 1, 1)
            seen = device.table[row, : last + 1].long()
            assert torch.equal(pool.k(0)[seen], want), row
        assert torch.equal(device.last_slots, device.table[device.token_rows, device.last_places].long())
        assert not device.table[0].any()
    assert refused > STEPS // 10 and ended_unplanned > STEPS // 20
    for row, (generation, _) in held.items():
        memory.release(row, generation, ids(0))
    assert cross.allocator.available == PAGES
    memory.check_integrity()
