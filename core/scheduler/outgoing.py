"""Copies to host memory that are under way, and the leases on the pages that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from core.executor.interface import HostCopies
from core.memory.host_moves import CopyOut, HostCopy
from core.memory.host_tier import HostTier
from core.memory.request_memory import RequestMemory
from core.types.arrays import Ints

NO_SLOTS: Ints = np.empty(0, np.int64)


class Outgoing:
    """Begins copies, and ends their leases when they have landed."""

    def __init__(self, tier: HostTier, memory: RequestMemory, copies: HostCopies) -> None:
        self._tier = tier
        self._memory = memory
        self._copies = copies
        self._leases: dict[int, int] = {}
        """Number of a copy in flight -> the lease on the pages that it reads."""
        self._then: dict[int, Callable[[], None]] = {}
        """Number of a copy in flight -> what is called when it has landed."""

    def begin(
        self,
        copies: tuple[HostCopy, ...],
        row: int,
        start: int,
        then: Callable[[], None] | None = None,
        beside: tuple[Ints, ...] = (),
    ) -> None:
        """Copy the tokens of `row` from `start` on, a multiple of the page size, into `copies`; it may then go.

        `then` is called by `land` once they are there. `beside`: see `CopyOut`.
        """
        end = start + sum(copy.tokens for copy in copies)
        out = CopyOut(copies, self.slots(row, start, end), self._tier.take_given_up(), beside)
        self._leases[out.number] = self._memory.lend(row, end, start=start)
        if then is not None:
            self._then[out.number] = then
        self._copies.copy_out(out)

    def begin_beside(self, copy: HostCopy, beside: tuple[Ints, ...]) -> None:
        """Copy what `beside` names, behind the steps that were submitted, into `copy`, which has no tokens.

        The next step may write there: nothing is leased.
        """
        self._then[copy.number] = _nothing
        self._copies.copy_out(CopyOut((copy,), NO_SLOTS, self._tier.take_given_up(), beside))

    def after(self, copy: HostCopy, then: Callable[[], None]) -> None:
        """`then` is called once `copy`, of `begin_beside`, is there: at once if it is."""
        if copy.number in self._then:
            self._then[copy.number] = then
        else:
            then()

    def vacate(self, copies: tuple[HostCopy, ...], then: Callable[[], None]) -> None:
        """`then` is called by `land` once no step reads what was in the blocks of `copies` before."""
        out = CopyOut(copies, NO_SLOTS, self._tier.take_given_up())
        self._then[out.number] = then
        self._copies.copy_out(out)

    def views(self, copy: HostCopy, start: int = 0) -> Sequence[memoryview]:
        """The bytes of `copy` from token `start` on: see `HostCopies`."""
        return self._copies.host_views(copy, start)

    def land(self) -> bool:
        """End the leases of copies that have landed; whether there were any."""
        landed = self._copies.landed()
        for number in landed:
            if (lease := self._leases.pop(number, None)) is not None:
                self._memory.reclaim(lease)
            if (then := self._then.pop(number, None)) is not None:
                then()
        return bool(landed)

    def slots(self, row: int, start: int, end: int) -> Ints:
        """int64[end - start]: the KV slots of the tokens of `row` at [start, end)."""
        positions, size = np.arange(start, end), self._memory.page_size
        slots: Ints = self._memory.pages_of(row, end)[positions // size] * size + positions % size
        return slots


def _nothing() -> None:
    """Nothing waits for the copy."""
