"""Seeds played again with transfers in flight: pages that are leased keep what they hold, and all come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.proofs.sim.mutants import Patch
from tests.proofs.sim.mutants_of_leases import OF_LEASES
from tests.proofs.sim.replays import Replay

TRANSFERS = Replay("transfers", seeds=40)


@pytest.mark.parametrize(("oracle", "apply"), OF_LEASES, ids=lambda each: getattr(each, "__name__", each))
def test_the_mutant_is_seen(oracle: str, apply: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    TRANSFERS.check_mutant(oracle, apply, monkeypatch)


def test_leased_pages_keep_what_they_hold(seed: int) -> None:
    hits = TRANSFERS.check(seed)
    # That they end, give pages back and expire is what the mutants show, whose seeds are fixed.
    assert hits.counts["lease_begun"] > 0, hits.table()
