"""Commands are applied in order, those of one step and no more; instants stay in order whatever is swept out."""

from __future__ import annotations

from core.errors import DeadlinePassed
from core.scheduler.intake import FEW, Intake
from core.scheduler.outputs import Ending
from core.types.io import FinishReason
from core.types.request import Req
from tests.unit.core.scheduler.harness import Harness


def test_what_is_queued_during_a_drain_waits_for_the_next() -> None:
    """Else work that makes work, an ending that makes its client ask again, would keep a step from ever beginning."""
    harness = Harness()
    req, intake = harness.add([1, 2]), Intake()
    taken: list[Req | Ending] = []

    def again(command: Req | Ending) -> None:
        taken.append(command)
        if len(taken) < 10:
            intake.add(req)
            intake.end(Ending(req, FinishReason.CANCELLED))

    intake.end(Ending(req, FinishReason.CANCELLED))
    intake.add(req)
    intake.drain(again, again)
    assert [type(each) for each in taken] == [Ending, Req] and len(intake) == 4


def test_the_earliest_instant_comes_first_after_a_sweep() -> None:
    harness = Harness()
    gone, late, early = (harness.add([1, 2], max_tokens=100, deadline=at) for at in (40.0, 60.0, 50.0))
    others = [harness.add([3], deadline=1e9) for _ in range(2 * FEW)]
    harness.step()
    for req in (gone, *others):
        harness.end(req)
    harness.step()
    assert len(harness.scheduler.intake._expiries) < FEW, "they were swept out"
    assert harness.scheduler.next_expiry() == 50.0
    while harness.now < 55.0:
        harness.step()
    assert isinstance(harness.seen[early].error, DeadlinePassed) and harness.seen[late].error is None
    harness.drain()
