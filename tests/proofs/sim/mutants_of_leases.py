"""Mutants of leases: what a transfer in flight reads must stay, and come back once. `test_transfers` plays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from core.memory.leases import Leases
from core.memory.request_memory import RequestMemory
from core.types.arrays import Ints
from tests.proofs.sim.mutants import Patch, put

OF_LEASES: list[tuple[str, Callable[[Patch], None]]] = []
"""(the oracle that speaks first, mutant)."""


def _seen_by(oracle: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def enter(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        OF_LEASES.append((oracle, apply))
        return apply

    return enter


@_seen_by("leased_page")
def leased_pages_are_freed_at_once(patch: Patch) -> None:
    """Law 4: a page goes to its next owner while a transfer reads it."""
    patch.setattr(Leases, "divert", lambda self, pages: pages)


@_seen_by("page_owner")
def diverted_pages_never_come_back(patch: Patch) -> None:
    """A lease that ends gives nothing back."""

    def end(old: Any, self: Leases, number: int) -> tuple[Ints, Ints]:
        free, left = old(self, number)
        return free[:0], left

    put(patch, Leases, "end", end)


@_seen_by("lease_kept")
def leases_do_not_expire(patch: Patch) -> None:
    """A transfer that never tells its end keeps its pages for ever."""
    patch.setattr(Leases, "overdue", lambda self, now: [])


@_seen_by("leased_page")
def the_last_page_is_not_leased(patch: Patch) -> None:
    """The page that is not full is forgotten."""

    def lend(old: Any, self: RequestMemory, row: int, tokens: int, deadline: float | None = None) -> int:
        number: int = old(self, row, tokens, deadline)
        lease = self.leases._leases[number]
        self.leases._lent[lease.pages[-1:]] -= 1
        lease.pages = np.array(lease.pages[:-1])
        return number

    put(patch, RequestMemory, "lend", lend)
