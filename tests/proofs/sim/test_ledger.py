"""The ledger reports each kind of wrong entry by its name, and lets every legal story pass."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from core.device.checks import AssertMode, DeviceChecks
from core.device.streams import DeviceStreams
from core.memory.req_to_token_pool import ReqToTokenPool
from core.relay.payload import RelayPayload
from tests.proofs.sim.ledger import Entry, Fault, Ledger, LedgerViolation
from tests.proofs.sim.real_step import BookedFutureMap

Play = Callable[[Ledger], None]


def write_write(books: Ledger) -> None:
    books.write(3, 0, 1)
    books.write(3, 0, 2)


def read_read(books: Ledger) -> None:
    books.write(3, 0, 1)
    books.read(3, 0, 2)
    books.read(3, 0, 3)


def read_before_write(books: Ledger) -> None:
    books.read(3, 0, 2)


def read_of_a_former_owner(books: Ledger) -> None:
    books.write(3, 0, 1)
    books.read(3, 1, 2)


def read_by_one_who_left(books: Ledger) -> None:
    books.write(3, 0, 1)
    books.discard(3, 0)
    books.read(3, 0, 2)


def write_by_one_who_left(books: Ledger) -> None:
    books.write(3, 0, 1)
    books.discard(3, 0)
    books.write(3, 0, 2)


def write_over_a_new_owner(books: Ledger) -> None:
    books.write(3, 1, 1)
    books.write(3, 0, 2)


def unread_token_of_a_former_owner(books: Ledger) -> None:
    """Its row was taken over without having been freed."""
    books.write(3, 0, 1)
    books.write(3, 1, 2)


@pytest.mark.parametrize(
    ("play", "fault", "step", "since"),
    [
        (write_write, Fault.WRITE_WRITE, 2, 1),
        (read_read, Fault.READ_READ, 3, 2),
        (read_before_write, Fault.READ_BEFORE_WRITE, 2, 0),
        (read_of_a_former_owner, Fault.FOREIGN_GENERATION, 2, 1),
        (read_by_one_who_left, Fault.FOREIGN_GENERATION, 2, 0),
        (write_by_one_who_left, Fault.FOREIGN_GENERATION, 2, 0),
        (write_over_a_new_owner, Fault.FOREIGN_GENERATION, 2, 1),
        (unread_token_of_a_former_owner, Fault.WRITE_WRITE, 2, 1),
    ],
)
def test_each_violation_has_its_name(play: Play, fault: Fault, step: int, since: int) -> None:
    collecting = Ledger(collect=True)
    play(collecting)
    (entry,) = collecting.found
    assert (entry.fault, entry.step, entry.since, entry.row) == (fault, step, since, 3)
    with pytest.raises(LedgerViolation, match=fault.value) as raised:
        play(Ledger())
    assert raised.value.entry == entry


def test_a_chain_of_decodes_is_legal() -> None:
    books = Ledger()
    books.write(1, 0, 1)
    for step in range(2, 20):
        books.read(1, 0, step)
        books.write(1, 0, step)
    assert books.open_rows() == [1]
    books.discard(1, 0)
    assert books.open_rows() == [] and (books.writes, books.reads, books.discards) == (19, 18, 1)


def test_overshoot_and_free_are_discards() -> None:
    """The extra step of a request that ended writes a token for nobody; the next owner's first write is no conflict."""
    books = Ledger()
    books.write(2, 4, 1)
    books.read(2, 4, 2)
    books.write(2, 4, 2)
    books.discard(2, 4)
    books.write(2, 5, 3)
    books.read(2, 5, 4)
    assert not books.found


def test_a_row_freed_before_its_first_token_is_legal() -> None:
    books = Ledger()
    books.discard(2, 0)
    books.write(2, 1, 3)
    assert not books.found


def test_a_collecting_ledger_goes_on_after_a_violation() -> None:
    books = Ledger(collect=True)
    write_write(books)
    read_read(books)
    assert [entry.fault for entry in books.found] == [Fault.WRITE_WRITE, Fault.WRITE_WRITE, Fault.READ_READ]
    assert str(books.found[0]) == "write-write: step 2, row 3 generation 0; conflicts with step 1"


def test_random_legal_traffic_passes_and_one_wrong_entry_is_found(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        books, step = Ledger(), 0
        owners = dict.fromkeys((1, 2, 3), (0, False))
        for _ in range(rng.randint(1, 40)):
            step += 1
            row = rng.choice([1, 2, 3])
            generation, pending = owners[row]
            if rng.random() < 0.2:
                books.discard(row, generation)
                owners[row] = (generation + 1, False)
            elif pending:
                books.read(row, generation, step)
                owners[row] = (generation, False)
            else:
                books.write(row, generation, step)
                owners[row] = (generation, True)
        row = rng.choice([1, 2, 3])
        generation, pending = owners[row]
        wrong = books.write if pending else books.read
        with pytest.raises(LedgerViolation):
            wrong(row, generation, step + 1)


def test_the_real_map_keeps_books() -> None:
    cpu, books = torch.device("cpu"), Ledger(collect=True)
    pool = ReqToTokenPool(4, 8, cpu)
    booked = BookedFutureMap(pool, DeviceStreams(cpu), DeviceChecks(AssertMode.COUNT, cpu), books)
    booked.own({2: 7}, step=1)
    rows = torch.tensor([2])
    booked.stash(rows, RelayPayload(torch.tensor([5])))
    booked.gather(rows)
    booked.gather(rows)
    assert books.found == [Entry(Fault.READ_READ, 2, 7, 1, 1)]
    booked.own({3: 1}, step=2)
    booked.stash(rows, RelayPayload(torch.tensor([5])))
    assert books.found[1].fault is Fault.FOREIGN_GENERATION, "the step does not work for that row at all"
