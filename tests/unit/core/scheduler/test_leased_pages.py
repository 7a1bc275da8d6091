"""Pages of transfers in flight count as coming: requests wait for them, and none gives way in the meantime."""

from __future__ import annotations

from core.types.request import Req, RequestState
from tests.unit.core.scheduler.harness import Harness


def leased(world: Harness, prompt: int, deadline: float | None = None) -> int:
    """The number of a lease on the pages of a request that ran and was cancelled; nothing else holds them."""
    gone = world.add(range(1, prompt + 1), max_tokens=40, priority=-50)
    for _ in range(4):
        world.step()
    lease = world.memory.lend(gone.row, prompt, deadline)
    world.end(gone)
    for _ in range(3):
        world.step()
    assert gone.row == 0 and world.memory.leases.diverted == -(-prompt // 4)
    return lease


def test_rows_wait_for_leased_pages_and_none_is_retracted() -> None:
    world = Harness(rows=3, pages=7, cache="none")
    lease = leased(world, 16)
    reqs = [world.add([each, 2, 3, 4], max_tokens=9) for each in (5, 6)]
    for _ in range(30):
        world.step()
    assert world.memory.allocator.available == 0 and world.scheduler.stats.leased_pages == 4
    assert [(req.retractions, req.state) for req in reqs] == [(0, RequestState.RUNNING)] * 2
    world.memory.reclaim(lease)
    world.drain()
    for req in reqs:
        world.expect(req)
    assert world.scheduler.stats.preemptions == 0 and world.scheduler.stats.leased_pages == 0


def test_no_request_gives_way_to_one_that_leased_pages_will_do_for() -> None:
    world = Harness(rows=3, pages=9, cache="none", policy="priority")
    lease = leased(world, 16)
    low = world.add([7, 2, 3, 4, 5, 6, 7, 8], max_tokens=9, priority=10)
    for _ in range(4):
        world.step()
    assert low.state is RequestState.RUNNING, "and it may give way again: it never did"
    high = world.add([8, *range(2, 14)], max_tokens=2, priority=-10)
    for _ in range(2):
        world.step()
    assert _states(low, high) == [RequestState.RUNNING, RequestState.WAITING] and low.retractions == 0
    world.memory.reclaim(lease)
    world.drain()
    world.expect(low)
    world.expect(high)
    assert low.retractions == 0


def test_a_lease_without_an_end_is_over_at_its_deadline() -> None:
    world = Harness(rows=3, pages=7, cache="none")
    leased(world, 16, deadline=20.0)
    assert world.scheduler.next_expiry() == 20.0, "the loop is woken then"
    while world.now < 20.0:
        assert world.memory.leases.diverted == 4
        world.step()
    assert world.memory.leases.diverted == 0 and world.scheduler.next_expiry() is None
    assert world.memory.allocator.available == 7


def _states(*reqs: Req) -> list[RequestState]:
    return [req.state for req in reqs]
