"""NaN under simulation: what a step yields that goes wrong, which requests read it, and that none does later.

A spoiled row writes NaN into every slot that it computes in that step, and a row that reads one is spoiled as well, in
whatever step. The device learns from a submitted batch which requests had failed by then. No step from that batch on
may read anything that one of those computed, in whatever row it was at the time, nor what followed from its NaN. Where
a request failed for what it had read, the NaN of its author is forbidden too. What that author computed before it is
not: finite logits of a third request may have vouched for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from core.errors import RequestFailed
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.outputs import Ending
from core.types.request import Req
from tests.proofs.sim.companions import Owner
from tests.proofs.sim.kv_memory import Table
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.story import Hits, Violation


class Poison:
    """By KV slot, who computed it and whose NaN it holds. `watch` is the host's side, all else the device's."""

    def __init__(self, page_size: int, hits: Hits) -> None:
        self._page_size, self._hits = page_size, hits
        self._author: dict[int, Owner] = {}
        self._origin: dict[int, Owner] = {}
        """Of slots that hold NaN: the owner whose step went wrong."""
        self._blamed: dict[Owner, Owner] = {}
        """By owner that was spoiled, the origin; itself where its own step went wrong."""
        self._condemned: set[Owner] = set()
        self._forbidden: set[int] = set()
        """Slots that an owner computed whose request failed."""
        self._news: list[tuple[Owner, bool]] = []
        """Owners that are to be condemned, and whether their own request failed."""
        self._owners: dict[Req, list[Owner]] = {}
        self.bad: dict[int, Owner] = {}
        """Rows of the step that runs whose numbers are NaN, and their owners."""

    def watch(self, lifecycle: Lifecycle) -> None:
        """Hear of every row that a request gets, and of requests that fail."""
        admit, end = lifecycle.admit, lifecycle.end

        def admitted(req: Req, *args: Any) -> bool:
            taken = admit(req, *args)
            if taken:
                self._owners.setdefault(req, []).append((req.row, req.generation))
            return taken

        def ended(ended: Ending, **how: Any) -> None:
            owners = self._owners.pop(ended.req, [])
            if isinstance(ended.error, RequestFailed):
                # Where it only read what was wrong, that must be found by no request either.
                blamed = (self._blamed[owner] for owner in owners if owner in self._blamed)
                self._news += [*((owner, True) for owner in owners), *((origin, False) for origin in blamed)]
            end(ended, **how)

        lifecycle.admit, lifecycle.end = admitted, ended  # type: ignore[method-assign]

    def take(self) -> list[tuple[Owner, bool]]:
        """Owners to condemn since the submission before, and whether their own requests failed."""
        news, self._news = self._news, []
        return news

    def begin(self, condemned: Iterable[tuple[Owner, bool]]) -> None:
        """A step that was submitted when `take` had given `condemned` runs next."""
        self.bad = {}
        news = list(condemned)
        self._condemned.update(owner for owner, _ in news)
        if failed := {owner for owner, own in news if own}:
            self._forbidden.update(slot for slot, author in self._author.items() if author in failed)

    def freed(self, pages: Iterable[int]) -> None:
        """What `pages` held is gone."""
        size = self._page_size
        for slot in (slot for page in pages for slot in range(page * size, (page + 1) * size)):
            self._author.pop(slot, None)
            self._origin.pop(slot, None)
            self._forbidden.discard(slot)

    def run(self, plain: Plain, tables: Sequence[Table], out: Sequence[int], spoil: int) -> None:
        """Write and read for all rows of the step; `spoil` is the place of the row that goes wrong, -1 for none."""
        at = 0
        rows = zip(plain.rows, plain.generations, plain.lens, plain.ends, tables, strict=True)
        for place, (row, generation, length, end, table) in enumerate(rows):
            owner, written = (row, generation), out[at : at + length]
            at += length
            for slot in written:
                self._author[slot] = owner
            if not (self._origin or self._forbidden or place == spoil):
                continue
            origin = self._read(owner, table[: end - length], plain.step_id)
            if origin is None and place == spoil:
                origin = owner
            if origin is not None:
                self.bad[row], self._blamed[owner] = owner, origin
                self._origin.update(dict.fromkeys(written, origin))

    def _read(self, owner: Owner, slots: Sequence[int], step: int) -> Owner | None:
        """The origin of the first NaN among `slots`."""
        found: Owner | None = None
        for place, slot in enumerate(slots):
            origin = self._origin.get(slot)
            if slot in self._forbidden or origin in self._condemned:
                who = origin if slot not in self._forbidden else self._author[slot]
                text = f"step {step} row {owner[0]} position {place} reads slot {slot}, of {who}, which had failed"
                raise Violation("poison_read", text)
            found = found or origin
        if found is not None and self._author[slots[0]] != owner:
            self._hits("poison_spread")
        return found
