"""The strict books of the FutureMap: who wrote a row, who read it, and what was thrown away on purpose.

The device check sees a read without a write. It cannot see two writes without a read between them, because that is
legal when the token is meant for nobody: the extra step of a request that ended, and whatever is pending when a row is
freed. Here those are said aloud (`discard`), so everything else is a violation with a name:

- `write-write`: a token was written over one that nobody had read;
- `read-read`: a token was read twice;
- `read-before-write`: the owner read before its first token was there;
- `foreign-generation`: the row was read or written by somebody who is not its owner, or holds another owner's token.

Events come in the order in which the forward stream executes them. A middle chunk samples nothing and so writes
nothing; if it ever did, that would need a discard too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Fault(Enum):
    """The four ways to keep wrong books."""

    WRITE_WRITE = "write-write"
    READ_READ = "read-read"
    READ_BEFORE_WRITE = "read-before-write"
    FOREIGN_GENERATION = "foreign-generation"


@dataclass(frozen=True, slots=True)
class Entry:
    """One violation. `step` is the step that did it, `since` the step of the entry it conflicts with (0: none)."""

    fault: Fault
    row: int
    generation: int
    step: int
    since: int

    def __str__(self) -> str:
        owner = f"row {self.row} generation {self.generation}"
        return f"{self.fault.value}: step {self.step}, {owner}; conflicts with step {self.since}"


@dataclass(slots=True)
class _Cell:
    """What the books say of one row. `pending`: written and not read yet. `step` 0: nothing was written."""

    generation: int = -1
    step: int = 0
    read_by: int = 0
    pending: bool = False


class LedgerViolation(AssertionError):
    """The first wrong entry, raised at once by a ledger that is not told to collect."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        super().__init__(str(entry))


class Ledger:
    """Books of all rows. Raises at the first violation, or collects them all in `found` when `collect` is set."""

    def __init__(self, *, collect: bool = False) -> None:
        self.found: list[Entry] = []
        self.writes = self.reads = self.discards = 0
        self._collect = collect
        self._cells: dict[int, _Cell] = {}
        # Owners whose row was freed: (row, generation) below this may do nothing any more.
        self._ended: dict[int, int] = {}

    def write(self, row: int, generation: int, step: int) -> None:
        """`step` stashed a token for the owner (row, generation)."""
        self.writes += 1
        cell = self._cell(row)
        if generation <= self._ended.get(row, -1) or generation < cell.generation:
            self._report(Fault.FOREIGN_GENERATION, row, generation, step, cell.step)
        elif cell.pending:
            # Of whomever: a former owner's token would have been discarded when its row was freed.
            self._report(Fault.WRITE_WRITE, row, generation, step, cell.step)
        cell.generation, cell.step, cell.read_by, cell.pending = generation, step, 0, True

    def read(self, row: int, generation: int, step: int) -> None:
        """`step` gathered the newest token of the owner (row, generation)."""
        self.reads += 1
        cell = self._cell(row)
        if generation <= self._ended.get(row, -1) or (cell.step and cell.generation != generation):
            self._report(Fault.FOREIGN_GENERATION, row, generation, step, cell.step)
        elif not cell.step:
            self._report(Fault.READ_BEFORE_WRITE, row, generation, step, 0)
        elif not cell.pending:
            self._report(Fault.READ_READ, row, generation, step, cell.read_by)
        cell.read_by, cell.pending = step, False

    def discard(self, row: int, generation: int) -> None:
        """The owner gave the row back: what is pending was meant for nobody, and its time is over."""
        self.discards += 1
        self._ended[row] = max(generation, self._ended.get(row, -1))
        self._cells.pop(row, None)

    def open_rows(self) -> list[int]:
        """Rows with a token that was neither read nor discarded; empty when everybody has left."""
        return [row for row, cell in self._cells.items() if cell.pending]

    def _cell(self, row: int) -> _Cell:
        cell = self._cells.get(row)
        if cell is None:
            cell = self._cells[row] = _Cell()
        return cell

    def _report(self, fault: Fault, row: int, generation: int, step: int, since: int) -> None:
        entry = Entry(fault, row, generation, step, since)
        self.found.append(entry)
        if not self._collect:
            raise LedgerViolation(entry)
