"""Seeds played again with pauses and exchanged weights: nothing that was computed before is read afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.proofs.sim.mutants import Patch
from tests.proofs.sim.mutants_of_standstills import OF_STANDSTILLS
from tests.proofs.sim.replays import Replay
from tests.proofs.sim.story import Hits

STANDSTILLS = Replay("standstills", seeds=60, beside=("transfers",))


@pytest.mark.parametrize(("oracle", "apply"), OF_STANDSTILLS, ids=lambda each: getattr(each, "__name__", each))
def test_the_mutant_is_seen(oracle: str, apply: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    STANDSTILLS.check_mutant(oracle, apply, monkeypatch)


def test_nothing_of_the_old_weights_is_read(seed: int) -> None:
    hits = STANDSTILLS.check(seed)
    assert hits.counts["start_over"] > 0 and hits.counts["pause"] > 0, hits.table()


@pytest.mark.parametrize("known", [2510610255873, 12631490400261, 7884064426786])
def test_with_transfers_as_well(known: int) -> None:
    """Three that failed: an oracle forgot what it had let pass, a page without an owner kept its state's slot, and a
    request gave way to one that also needs pages that are leased.
    """
    STANDSTILLS.play(known, Hits())
