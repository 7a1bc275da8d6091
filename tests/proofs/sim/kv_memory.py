"""What the KV slots of the fake device hold, and the proof that a read through a page table saw the right ones.

A slot holds a hash of the whole prefix that ends in it, and beside it the hash it was made from. A reader walks all
slots of its table and compares each slot's `before` with what the slot in front of it holds. If all of them agree, then
by induction the last slot holds the hash of exactly the tokens in front of it, in order. So one comparison of two
lists, at the speed of C, replaces hashing the sequence again, and a wrong page, a stale row, a missing write or a
changed order is found by the step that reads it, with its page, and not only when its token turns out wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.proofs.sim.reference import link
from tests.proofs.sim.story import Violation

UNWRITTEN = -1
NEVER = -2
"""Differs from UNWRITTEN, so that an unwritten slot fits behind nothing, another unwritten one included."""

Table = list[int]
"""One row of `req_to_token`: the slot of each position."""


class KVMemory:
    """`num_slots` slots; those of page 0 are padding, and neither written nor read by anybody real."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.page_size = page_size
        self._held = [UNWRITTEN] * num_slots
        self._before = [NEVER] * num_slots

    def at(self, slot: int) -> int:
        """What `slot` holds: the hash of the prefix that it ends."""
        return self._held[slot]

    def page(self, page: int) -> list[int]:
        """What the slots of `page` hold, in order."""
        return self._held[page * self.page_size : (page + 1) * self.page_size]

    def poison(self, pages: Iterable[int]) -> None:
        """`pages` were freed: whoever reads them before their next owner wrote them is wrong."""
        size = self.page_size
        for page in pages:
            self._held[page * size : (page + 1) * size] = [UNWRITTEN] * size
            self._before[page * size : (page + 1) * size] = [NEVER] * size

    def run(
        self,
        rows: list[int],
        starts: list[int],
        lens: list[int],
        ids: list[int],
        tables: list[Table],
        out: list[int],
        roots: list[int],
        every: bool = False,
    ) -> list[int]:
        """One step: write all its tokens at the slots `out`, then read every row whole. Returns what each row's last
        slot holds; with `every`, what the slot of each token does.

        `tables[i]` is the page table of `rows[i]`, and `roots[i]` what its first token follows. All of a batch's
        writes come before its reads, as in every layer of a real model, so a row may read what a row before it wrote in
        the same step.
        """
        if len(ids) != len(out) or len(set(out)) != len(out) or min(out) < self.page_size:
            raise Violation("out_cache_loc", f"{len(ids)} tokens for slots {out}")
        place = 0
        for row, start, length, table, root in zip(rows, starts, lens, tables, roots, strict=True):
            self._write(row, start, ids[place : place + length], table, out[place : place + length], root)
            place += length
        found: list[int] = []
        for row, start, length, table, root in zip(rows, starts, lens, tables, roots, strict=True):
            found += self._read(row, start + length, table, root)[start if every else -1 :]
        return found

    def _write(self, row: int, start: int, ids: list[int], table: Table, out: list[int], root: int) -> None:
        if table[start : start + len(ids)] != out:
            raise Violation(
                "page_table", f"row {row} from {start}: table {table[start : start + len(ids)]}, plan {out}"
            )
        held, before = self._held, self._before
        state = held[table[start - 1]] if start else root
        for position, (token, slot) in enumerate(zip(ids, out, strict=True), start):
            before[slot] = state
            held[slot] = state = link(state, token, position)

    def _read(self, row: int, length: int, table: Table, root: int) -> list[int]:
        """What the first `length` slots of `table` hold."""
        seen = table[:length]
        values = list(map(self._held.__getitem__, seen))
        befores = list(map(self._before.__getitem__, seen))
        if befores[0] != root or befores[1:] != values[:-1]:
            self._blame(row, seen, values, befores, root)
        return values

    def _blame(self, row: int, slots: Table, values: list[int], befores: list[int], root: int) -> None:
        for position, (slot, before) in enumerate(zip(slots, befores, strict=True)):
            expected = values[position - 1] if position else root
            if before != expected:
                page, what = (
                    slot // self.page_size,
                    "never written" if before == NEVER else "written for another prefix",
                )
                raise Violation("kv_read", f"row {row} position {position} reads slot {slot} of page {page}: {what}")
