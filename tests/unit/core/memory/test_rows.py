"""Row ownership: padding, atomic allocation, generations, double and foreign frees."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from core.invariants import InvariantViolation
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.rows import RowAllocator


def test_hands_out_every_row_but_padding_and_then_none() -> None:
    rows = RowAllocator(3)
    taken = [rows.alloc() for _ in range(3)]
    assert sorted(r for r, _ in filter(None, taken)) == [1, 2, 3]
    before = rows.generations.copy()
    assert rows.alloc() is None
    assert (rows.generations == before).all() and rows.available == 0 and rows.used == 3
    rows.check_integrity()


def test_free_ends_the_generation_at_once() -> None:
    rows = RowAllocator(1)
    row, generation = rows.alloc() or (0, 0)
    identity = np.array([row]), np.array([generation])
    assert rows.is_current(*identity).all()
    rows.free(row, generation)
    assert not rows.is_current(*identity).any(), "a result that arrives while the row is free is stale too"
    assert rows.alloc() == (row, generation + 1)


@pytest.mark.parametrize(
    ("row", "generation", "name"),
    [(1, 0, "row_double_free"), (0, 0, "row_padding_reserved"), (9, 0, "row_padding_reserved")],
)
def test_wrong_frees_are_named(row: int, generation: int, name: str) -> None:
    rows = RowAllocator(2)
    with pytest.raises(InvariantViolation, match=name):
        rows.free(row, generation)


def test_a_former_owner_cannot_free() -> None:
    rows = RowAllocator(1)
    row, old = rows.alloc() or (0, 0)
    rows.free(row, old)
    rows.alloc()
    with pytest.raises(InvariantViolation, match="row_foreign_generation"):
        rows.free(row, old)


def test_random_use_against_a_dict_model(seed: int) -> None:
    rng = random.Random(seed)
    rows, held = RowAllocator(5), dict[int, int]()
    for _ in range(2000):
        if rng.random() < 0.5:
            taken = rows.alloc()
            assert (taken is None) == (len(held) == 5)
            if taken is not None:
                assert taken[0] not in held
                held[taken[0]] = taken[1]
        elif held:
            row = rng.choice(list(held))
            rows.free(row, held.pop(row))
        rows.check_integrity()
        assert rows.used == len(held)


def test_integrity_check_sees_a_leak_and_a_handed_out_padding_row() -> None:
    rows = RowAllocator(2)
    rows._free.pop()
    with pytest.raises(InvariantViolation, match="row_conservation"):
        rows.check_integrity()
    rows = RowAllocator(2)
    rows._free.append(0)
    with pytest.raises(InvariantViolation, match="row_padding_reserved"):
        rows.alloc()


def test_row_buffers_have_the_length_of_the_table() -> None:
    pool = ReqToTokenPool(4, 16, torch.device("cpu"))
    buffer = pool.new_row_buffer((3,), torch.int64, -1)
    assert buffer.shape == (5, 3) and (buffer == -1).all()
    assert pool.table.shape == (5, 16) and pool.num_rows == 5
    pool.write(torch.tensor([4, 2, 4]), torch.tensor([0, 3, 3]), torch.tensor([7, 5, 8]), 4)
    assert pool.table[4].tolist() == [28, 29, 30, 31, *[0] * 8, 32, 33, 34, 35]
    assert pool.table[2].tolist() == [*[0] * 12, 20, 21, 22, 23] and not pool.table[1].any() and not pool.table[3].any()
    pool.check_padding()
    pool.table[0, 3] = 1
    with pytest.raises(InvariantViolation, match="row_padding_reserved"):
        pool.check_padding()
