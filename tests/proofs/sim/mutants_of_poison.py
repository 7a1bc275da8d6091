"""Mutants of what becomes of a request that failed with NaN, and of what it computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.memory.request_memory import RequestMemory
from core.memory.seat import Doubt
from core.scheduler.lifecycle import Lifecycle
from core.types.arrays import Ints
from tests.proofs.sim.mutants import Patch, mutant, put


@mutant("poison_read")
def failed_request_is_only_ended(patch: Patch) -> None:
    """As any other request that ends: its pages stay in the cache."""
    patch.setattr(Lifecycle, "condemn", lambda self, ended: self.end(ended))


@mutant("poison_read")
def early_offers_stay(patch: Patch) -> None:
    """What it offered while it computed is still found; only what it had for itself goes."""
    put(patch, RequestMemory, "doubt", lambda old, self, *args: Doubt(None, ()))


@mutant("poison_read", seeds=(652,))
def readers_go_on(patch: Patch) -> None:
    """They keep what they lock, and so it is kept for others too."""

    def spare(old: Any, self: RequestMemory, row: int, ids: Ints, computed_from: int) -> Doubt:
        doubt: Doubt = old(self, row, ids, computed_from)
        return Doubt(None, ()) if doubt.readers else doubt

    put(patch, RequestMemory, "doubt", spare)


@mutant("poison_read")
def prefix_is_always_vouched_for(patch: Patch) -> None:
    """Pages of a request that left before it had logits: each request that reads them fails, time and again."""

    def trusting(old: Any, self: RequestMemory, pages: int, *args: Any) -> None:
        old(self, pages, *args)
        self.sound._sound[:] = True

    put(patch, RequestMemory, "_fill", trusting)


@mutant("invariant:request_state", "positions", "tokens", seeds=(545,))
def token_of_a_retracted_reader_is_taken(patch: Patch) -> None:
    """The result in which it was retracted has a token for it."""
    from core.scheduler.result_processor import ResultProcessor

    patch.setattr(ResultProcessor, "_is_current", lambda self, result, places: np.ones(len(places), np.bool_))
