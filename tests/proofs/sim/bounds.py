"""How far each row is planned, at least and at most, by books of its own; and how many drafts a plan must allow for.

A step that verifies d drafts brings a row between one token and d + 1. Until its result is there, all of these are
planned for. `planned` and `planned_lower` must say exactly this, and where nothing is in flight exactly where the
device is. Without drafts the two are one, which other oracles hold on to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.batch.result import StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.types.request import Req
from tests.proofs.sim.clients import Client
from tests.proofs.sim.companions import Owner
from tests.proofs.sim.family import Family, View
from tests.proofs.sim.story import Violation


@dataclass(slots=True)
class Book:
    """Of one owner of a row. `most` counts drafts beyond the end of the request too, as a plan does."""

    least: int
    most: int
    flying: dict[int, int] = field(default_factory=dict)
    """Step -> drafts, of decode steps whose results were not taken."""


class Bounds(Family):
    """Silent where nothing is guessed."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._depth, self._budget = view.scenario.drafts, view.scenario.config.prompt_tokens
        self._books: dict[Owner, Book] = {}
        self._proposed = 0
        """The most drafts for each row that the step before proposed."""
        self._gave_way = False
        """Whether a request gave way since the last look."""
        if self._depth is not None:
            self._watch()

    def _watch(self) -> None:
        lifecycle: Any = self.view.scheduler._lifecycle
        retract = lifecycle.retract

        def gave_way(req: Req, **kwargs: Any) -> None:
            self._gave_way = True
            book = self._books.get((req.row, req.generation))
            if book is not None and any(book.flying.values()):
                self.view.hits("draft_retracted")
            client: Client = req.sink
            own = client.gave_way + client.by_class + client.by_share + client.forced
            if kwargs.get("keep", True) and req.retractions == own:
                self._check_pressure(client)
            retract(req, **kwargs)

        lifecycle.retract = gave_way

    def _check_pressure(self, loser: Client) -> None:
        """A request gives way for pages, and not for those of drafts: one token of each row needs more than there are.

        It is no class, no share and no force, so pages ran out: of windows or, where there are none, of the KV pool.
        """
        if self.view.scenario.windows is not None:
            return
        self._settle()
        memory, short = self.view.memory, 0
        for client in self.view.seated():
            row, book = client.req.row, self._books.get((client.req.row, client.req.generation))
            if book is not None and client.admissions[-1].target <= book.most < client.last:
                short += book.most >= int(memory._count[row]) * memory.page_size
        if short <= memory.obtainable_pages:
            text = f"{loser.name} gives way: {short} rows need a page, {memory.obtainable_pages} are left"
            raise Violation("draft_plan", text)

    def planned(self, batch: ScheduleBatch | None) -> None:
        """Where the plan believes each row to be, and what it allows for."""
        if self._depth is None:
            return
        self._settle()
        if batch is None:
            return
        if batch.spec is None:
            raise Violation("draft_plan", f"step {batch.step_id} has no plan of drafts")
        fresh, chunks = set(batch.fresh_rows.tolist()), batch.num_extend
        owners = list(zip(batch.rows.tolist(), batch.generations.tolist(), strict=True))
        starts, ends = batch.prefix_lens.tolist(), batch.seq_lens.tolist()
        for (row, generation), start, end in zip(owners[:chunks], starts, ends, strict=False):
            book = self._books[row, generation] = Book(start, start) if row in fresh else self._books[row, generation]
            self._agree(batch.step_id, row, book, start, start)
            book.least = book.most = end
        self._check_seeds(batch)
        drafts = batch.spec.drafts.tolist()
        self._check_drafts(batch, [self._books[owner] for owner in owners[chunks:]], drafts)
        # Verified are those that the step before has proposed.
        self._proposed = batch.spec.aim.most
        decodes = zip(owners[chunks:], batch.lower_lens.tolist(), starts[chunks:], drafts, strict=True)
        for owner, least, most, count in decodes:
            book = self._books[owner]
            self._agree(batch.step_id, owner[0], book, least, most)
            book.least, book.most, book.flying[batch.step_id] = least + 1, most + count + 1, count
        self._enter()

    def after_step(self) -> None:
        """What the scheduler believes, and what the device knows once all that was submitted is over."""
        if self._depth is None:
            return
        self._settle()
        running, lens = self.view.scheduler.running, self.view.device.lens
        for client in self.view.seated():
            row, book = client.req.row, self._books.get((client.req.row, client.req.generation))
            if book is None:
                continue
            self._agree(0, row, book, int(running.planned_lower[row]), int(running.planned[row]))
            if not self.view.device.in_flight and not book.least == book.most == lens[row]:
                text = f"{client.name} is at {book.least} to {book.most} with nothing in flight, the device at"
                raise Violation("bounds", f"{text} {lens[row]}")
        self._gave_way = False
        self._enter()

    def _agree(self, step: int, row: int, book: Book, least: int, most: int) -> None:
        if (least, most) != (book.least, book.most):
            text = f"step {step} row {row}: between {least} and {most}, by the books {book.least} and {book.most}"
            raise Violation("bounds", text)

    def _settle(self) -> None:
        """Take over what results said; they speak of rows in the order in which their steps were planned."""
        for result in self.view.device.taken:
            self._take(result)
        self.view.device.taken.clear()

    def _take(self, result: StepResult) -> None:
        counts = np.ones(len(result.rows), np.int64) if result.accepted is None else result.accepted.counts
        owners = zip(result.rows.tolist(), result.generations.tolist(), strict=True)
        for owner, count in zip(owners, counts.tolist(), strict=True):
            book = self._books.get(owner)
            drafts = None if book is None else book.flying.pop(result.step_id, None)
            if book is not None and drafts is not None:
                book.least += count - 1
                book.most -= drafts + 1 - count

    def _enter(self) -> None:
        """For other families, and of those that are seated only."""
        books, self._books = self._books, {}
        for client in self.view.seated():
            owner = (client.req.row, client.req.generation)
            if owner in books:
                self._books[owner] = books[owner]
                client.admissions[-1].planned = books[owner].most

    def _check_seeds(self, batch: ScheduleBatch) -> None:
        """The drafter is told all that is known of a new owner, and whose text it is."""
        assert batch.spec is not None, "looked at before"
        expected = {}
        for row in batch.fresh_rows.tolist():
            req: Req = self.view.scheduler.running.reqs[row]
            client: Client = req.sink
            known = int(self.view.scheduler.running.known[row]) - req.prompt_len
            expected[row] = (req.salt, [*req.prompt.tolist(), *client.said[:known]])
        told = {seed.row: (seed.scope, seed.ids.tolist()) for seed in batch.spec.seeds}
        if told != expected:
            raise Violation("draft_plan", f"step {batch.step_id} seeds {told}, known is {expected}")

    def _check_drafts(self, batch: ScheduleBatch, books: list[Book], drafts: list[int]) -> None:
        """None beside a prompt, none over the budget, none beyond an end, and as many as that leaves: or none at all,
        where there are no pages for them.
        """
        assert batch.spec is not None and self._depth is not None, "looked at before"
        ends = [self._last(row) for row in batch.rows[batch.num_extend :].tolist()]
        if batch.spec.limits.tolist() != ends:
            raise Violation("draft_plan", f"step {batch.step_id} ends rows at {batch.spec.limits}, they end at {ends}")
        if not books:
            return
        most = min(self._proposed, self._budget // len(books) - 1)
        if (held := self.view.scenario.draft_room) is not None:
            most = min(most, held // len(books))
        room = [max(0, min(most, end - book.least - 1)) for book, end in zip(books, ends, strict=True)]
        if batch.num_extend:
            room = [0] * len(books)
        if drafts == room:
            return
        text = (
            f"step {batch.step_id}: {drafts} drafts, room for {room}, budget {self._budget}, {batch.num_extend} chunks"
        )
        if any(count > free for count, free in zip(drafts, room, strict=True)):
            raise Violation("draft_plan", text)
        if self._gave_way or len(self.view.memory.leases):
            # Of rows that were to decode when drafts were shared out, fewer are left; or some wait for leased pages.
            return
        waiting = self._waiting(set(batch.rows.tolist()))
        if any(drafts) or (not waiting and self._pages_suffice(batch, room, ends)):
            raise Violation("draft_plan", text)
        self.view.hits("draft_row_waits" if waiting else "draft_without_pages")

    def _waiting(self, planned: set[int]) -> list[Client]:
        """Requests beside the rows of a plan that could decode, but for a page that they need if their drafts in flight
        are right.
        """
        found, size = [], self.view.memory.page_size
        for client in self.view.seated():
            row, book = client.req.row, self._books.get((client.req.row, client.req.generation))
            if row in planned or book is None or not client.admissions[-1].target <= book.most < client.last:
                continue
            if book.least < book.most and book.most >= int(self.view.memory._count[row]) * size:
                found.append(client)
        return found

    def _pages_suffice(self, batch: ScheduleBatch, room: list[int], ends: list[int]) -> bool:
        """Whether pages are left for all that the rows could verify. Pages of windows may be what is short."""
        if self.view.scenario.windows is not None:
            return False
        memory, needed = self.view.memory, 0
        rows, starts = batch.rows[batch.num_extend :].tolist(), batch.prefix_lens[batch.num_extend :].tolist()
        for row, start, count, end in zip(rows, starts, room, ends, strict=True):
            needed += max(0, -(-min(start + count + 1, end) // memory.page_size) - int(memory._count[row]))
        return needed <= memory.obtainable_pages

    def _last(self, row: int) -> int:
        client: Client = self.view.scheduler.running.reqs[row].sink
        return client.last
