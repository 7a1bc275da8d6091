"""Encoder inputs under simulation: production `CrossPages`, and cross pages in plain integers behind their table.

An encoder's output at one token depends on the whole input (`reference.encode`). A step that starts a request writes it
where the writes say; every decoder token reads its row's through the table, and what was read is blended into the next
token. The device knows by the rows with new owners whose input it encodes, so a foreign, stale or missing page is found
by the step that reads it; an input that went to somebody else shows in the stream.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from core.batch.schedule_batch import ScheduleBatch
from core.memory.cross.cross_pages import CROSS, CrossPages, CrossWrites
from core.memory.request_memory import RequestMemory
from core.scheduler.running import RunningSet
from core.types.request import Req
from tests.proofs.sim.companions import CompanionSide, Owner
from tests.proofs.sim.cross_books import CrossBooks, CrossLeft
from tests.proofs.sim.kv_memory import UNWRITTEN, KVMemory, Table
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.reference import VOCAB, encode, heard
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Violation


class CrossSide(CompanionSide):
    """What both device sides share: the books, the contract of the writes, and the looks at what pages hold."""

    def __init__(self, scenario: Scenario, hits: Hits) -> None:
        cross = scenario.cross
        assert cross is not None, "a scenario without an encoder has no such side"
        self.host = CrossPages(cross.pages, scenario.page_size, scenario.rows + 1)
        self.books = CrossBooks(self.host, scenario.config.prompt_tokens, hits)
        self._size, self._pages = scenario.page_size, cross.pages
        self._writes: CrossWrites | None = None
        self._said: dict[int, list[int]] = {}
        """By row: what the encoder said of the input of its owner."""

    @abstractmethod
    def held(self, slots: Sequence[int]) -> list[int]:
        """What `slots` hold on the device."""

    @abstractmethod
    def slots_of(self, row: int, count: int) -> list[int]:
        """Where the device looks for the first `count` encoder tokens of `row`."""

    @abstractmethod
    def put(self, slots: Sequence[int], said: Sequence[int]) -> None:
        """Write what the encoder said."""

    @abstractmethod
    def forget(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Poison the table of `rows`, and `slots`: nobody has them now."""

    @abstractmethod
    def encoder_ids(self, plain: Plain) -> list[int]:
        """The inputs of the step that runs, one after another, as the device found them."""

    def check(self, memory: RequestMemory, running: RunningSet, seats: Sequence[Req]) -> None:
        """See `CompanionSide`."""
        self.books.check(seats)

    def leave(self, batch: ScheduleBatch, flying: Sequence[CrossLeft]) -> CrossLeft:
        """See `CompanionSide`."""
        return self.books.leave(batch, flying)

    def told(self, batch: ScheduleBatch) -> str:
        """See `CompanionSide`. Steps that encode nothing have nothing to tell."""
        writes: CrossWrites = batch.companion_writes[CROSS]
        pages: dict[int, list[int]] = {}
        for row, slot in zip(writes.rows.tolist(), writes.slots.tolist(), strict=True):
            pages.setdefault(row, []).append(slot // self._size)
        told = [f"row {row} in pages {sorted(set(found))}" for row, found in pages.items()]
        return f"encoder: {batch.encoder_lens.tolist()} tokens, {', '.join(told)}" if told else ""

    def take_back(self, owners: Sequence[Owner], left: CrossLeft) -> None:
        """See `CompanionSide`."""
        for row, _ in owners:
            self._said.pop(row, None)
        size = self._size
        self.forget(
            [row for row, _ in owners],
            [page * size + within for page in left.freed for within in range(size)],
        )

    def check_writes(self, plain: Plain, writes: CrossWrites | None) -> None:
        """Exactly the inputs of new owners come, each whole and in batch order, with an entry for each token."""
        self._writes = writes
        if writes is None:
            raise Violation("cross_writes", f"step {plain.step_id} does not say what its tokens see of their inputs")
        rows, lens = self._starting(plain), plain.encoder_lens
        if len(lens) != len(rows) or sum(lens) != len(plain.encoder_ids):
            text = f"step {plain.step_id}: inputs of {lens}, {len(plain.encoder_ids)} ids, new owners in {rows}"
            raise Violation("cross_writes", text)
        entries = [(row, place) for row, length in zip(rows, lens, strict=True) for place in range(length)]
        if list(zip(writes.rows.tolist(), writes.places.tolist(), strict=True)) != entries:
            text = f"step {plain.step_id}: entries {writes.rows.tolist()} for inputs of {lens} in {rows}"
            raise Violation("cross_writes", text)
        slots = writes.slots.tolist()
        if slots and not self._size <= min(slots) <= max(slots) < (self._pages + 1) * self._size:
            raise Violation("cross_writes", f"step {plain.step_id} writes slots {slots} of {self._pages} pages")

    def run(self, plain: Plain, ids: list[int], tables: list[Table], kv: KVMemory) -> list[int]:
        """See `CompanionSide`. All inputs are encoded before any decoder token reads."""
        self._encode(plain, ids)
        writes = self._writes
        assert writes is not None, "refused before"
        seen = list(zip(writes.batch_places.tolist(), writes.last_places.tolist(), strict=True))
        if len(seen) != len(ids):
            raise Violation(
                "cross_read", f"step {plain.step_id} says for {len(seen)} of {len(ids)} tokens what they see"
            )
        said, at = [], 0
        for row, length in zip(plain.rows, plain.lens, strict=True):
            for place, last in set(seen[at : at + length]):
                read = self.held(self.slots_of(plain.rows[place], last + 1))
                if read != self._said.get(row):
                    what = "no step wrote some of it" if UNWRITTEN in read else "that is not its input"
                    text = f"row {row} reads {last + 1} encoder tokens of row {plain.rows[place]}: {what}"
                    raise Violation("cross_read", text)
            at += length
            said.append(heard(read))
        return said

    def _starting(self, plain: Plain) -> list[int]:
        """Rows with new owners, in batch order."""
        fresh = set(plain.fresh)
        return [row for row in plain.rows if row in fresh]

    def _encode(self, plain: Plain, ids: list[int]) -> None:
        found, at, said = self.encoder_ids(plain), 0, []
        # Ids for the encoder are those behind the decoder's vocabulary (`cross_inputs.py`).
        if max(ids) >= VOCAB or (found and min(found) < VOCAB):
            text = f"step {plain.step_id}: the decoder gets {ids}, the encoder {found}"
            raise Violation("encoder_ids", text)
        for row, length in zip(self._starting(plain), plain.encoder_lens, strict=True):
            self._said[row] = encode(found[at : at + length])
            said += self._said[row]
            at += length
        assert self._writes is not None, "refused before"
        self.put(self._writes.slots.tolist(), said)

    def look_back(self, kv: KVMemory, left: CrossLeft) -> None:
        """See `CompanionSide`. What the host keeps for a request holds what the encoder said of its input."""
        for row, slots in left.slots.items():
            if self.held(slots) != self._said.get(row):
                text = f"slots {slots} of row {row} hold {self.held(slots)}, the encoder said {self._said.get(row)}"
                raise Violation("cross_kept", text)


class CrossTwin(CrossSide):
    """Table and slots as lists."""

    def __init__(self, scenario: Scenario, hits: Hits) -> None:
        super().__init__(scenario, hits)
        assert scenario.cross is not None
        self._held = [UNWRITTEN] * ((self._pages + 1) * self._size)
        self._blank = [0] * scenario.cross.longest
        self._table = [self._blank[:] for _ in range(scenario.rows + 1)]

    def held(self, slots: Sequence[int]) -> list[int]:
        """See `CrossSide`."""
        return list(map(self._held.__getitem__, slots))

    def slots_of(self, row: int, count: int) -> list[int]:
        """See `CrossSide`."""
        return self._table[row][:count]

    def put(self, slots: Sequence[int], said: Sequence[int]) -> None:
        """See `CrossSide`."""
        for slot, value in zip(slots, said, strict=True):
            self._held[slot] = value

    def forget(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """See `CrossSide`."""
        for row in rows:
            self._table[row] = self._blank[:]
        for slot in slots:
            self._held[slot] = UNWRITTEN

    def encoder_ids(self, plain: Plain) -> list[int]:
        """See `CrossSide`."""
        return plain.encoder_ids

    def begin(self, writes: CrossWrites | None) -> None:
        """See `CompanionSide`."""
        assert writes is not None, "refused before"
        entries = zip(writes.rows.tolist(), writes.places.tolist(), writes.slots.tolist(), strict=True)
        for row, place, slot in entries:
            self._table[row][place] = slot
