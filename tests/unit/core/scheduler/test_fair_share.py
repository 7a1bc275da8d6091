"""Tenants share a step's prompt tokens by weight, and rows and pages by what each holds; one alone has everything."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from core.scheduler.fair_share import FairShare
from core.scheduler.preemption import MIN_TOKENS, MOST_PER_PLAN
from core.types.request import Req, RequestState
from tests.unit.core.scheduler.harness import Harness

SOON = 3
"""Steps from arrival to first token of a short prompt: planned at once, run, taken."""


def first_token(world: Harness, req: Req, limit: int = 200) -> int:
    """Steps until it is there."""
    for steps in range(1, limit):
        world.step()
        if world.seen[req].tokens or world.seen[req].terminals:
            return steps
    pytest.fail(f"no token within {limit} steps")


def finish(world: Harness) -> None:
    world.drain()
    for req in world.seen:
        world.expect(req)
    assert not list(world.scheduler._lifecycle.shares), "a tenant without requests leaves nothing behind"


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("mixed_chunk", [True, False])
def test_a_long_prompt_of_one_holds_no_prompt_of_another_back(policy: str, mixed_chunk: bool) -> None:
    world = Harness(max_len=400, pages=200, policy=policy, mixed_chunk=mixed_chunk)
    long = [world.add(range(place, 300 + place), 2, tenant="a", priority=-5) for place in range(2)]
    for _ in range(3):
        world.step()
    short = world.add([9, 8, 7], 2, tenant="b", priority=5)
    assert first_token(world, short) <= SOON
    assert not any(world.seen[req].tokens for req in long)
    finish(world)


def test_many_prompts_of_one_hold_no_prompt_of_another_back() -> None:
    """As an `Embed` of many texts does, which is as many requests without an output."""
    world = Harness(rows=8, max_len=128, pages=400, chunked_prefill_size=32)
    for place in range(32):
        world.add([place, *range(100)], 1, tenant="a")
    for _ in range(3):
        world.step()
    for turn in range(10):
        assert first_token(world, world.add([turn, 8, 7], 1, tenant="b")) <= SOON
    world.drain()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_row_taken_by_one_another_is_admitted_at_once(policy: str) -> None:
    """Whatever priority the one asks for: it counts among its own requests only."""
    world = Harness(rows=8, policy=policy)
    many = [world.add([place, 2], 100, tenant="a", priority=-100) for place in range(16)]
    for _ in range(12):
        world.step()
    one = world.add([9, 8], 3, tenant="b", priority=100)
    assert first_token(world, one) <= SOON
    assert sum(req.retractions for req in many) == 1, "as few give way as will do"
    assert many[7].retractions == 1, "the last in line"
    stats = world.scheduler.stats
    assert (stats.preemptions, stats.share_preemptions, stats.priority_preemptions) == (1, 1, 0)
    finish(world)


def test_no_priority_takes_the_place_of_another_tenant() -> None:
    world = Harness(rows=4, policy="priority")
    low = [world.add([place, 2], 60, tenant="ab"[place % 2], priority=10) for place in range(4)]
    for _ in range(6):
        world.step()
    high = world.add([9, 8], 3, tenant="a", priority=-10)
    assert first_token(world, high) <= SOON
    assert [req.retractions for req in low] == [0, 0, 1, 0], "of its own tenant, though another's came last"
    assert world.scheduler.stats.priority_preemptions == 1
    finish(world)


def test_pages_held_by_one_go_to_another_over_several_plans() -> None:
    """Rows are plenty; the newcomer needs more pages than those that may give way in one plan hold."""
    world = Harness(rows=16, pages=160, page_size=4, max_len=300, cache="none", depth=1)
    many = [world.add([place, *range(1, 8)], 60, tenant="a") for place in range(16)]
    for _ in range(34):
        world.step()
    assert sum(req.state is RequestState.RUNNING for req in many) == 16
    big = world.add([place % 60 for place in range(240)], 3, tenant="b")
    before = sum(req.retractions for req in many)
    while big.state is RequestState.WAITING:
        gone = sum(req.retractions for req in many)
        world.step()
        assert sum(req.retractions for req in many) - gone <= MOST_PER_PLAN
        assert big.row or sum(req.retractions for req in many) > gone, "each plan brings it nearer"
    assert sum(req.retractions for req in many) - before > MOST_PER_PLAN
    finish(world)


@pytest.mark.parametrize(("weight", "rows", "hers"), [(1.0, 8, 4), (3.0, 8, 6), (1.0, 9, 4)])
def test_two_that_want_every_row_hold_them_by_weight_and_keep_them(weight: float, rows: int, hers: int) -> None:
    world = Harness(rows=rows, pages=400)
    for place in range(16):
        world.add([place, 2], 90, tenant="a")
    for _ in range(10):
        world.step()
    for place in range(16):
        world.add([place, 3], 90, tenant="b", weight=weight)
    for _ in range(10):
        world.step()
    held = Counter(req.tenant for req in world.scheduler.running.members())
    assert held == {"a": rows - hers, "b": hers}
    moved = world.scheduler.stats.preemptions
    for _ in range(60):
        world.step()
        assert Counter(req.tenant for req in world.scheduler.running.members()) == held
    assert moved == world.scheduler.stats.preemptions == hers, "no request gives way to have its place back"
    finish(world)


def test_freed_rows_go_to_the_tenant_that_holds_less() -> None:
    """Outputs of all lengths end all the time: shares stay alike without a single request giving way."""
    world = Harness(rows=8, pages=400)
    for place in range(60):
        for tenant in "ab":
            world.add([place, 2], 5 + (7 * place + (tenant == "b")) % 23, tenant=tenant)
    for step in range(150):
        world.step()
        held = Counter(req.tenant for req in world.scheduler.running.members())
        assert step < 3 or abs(held["a"] - held["b"]) <= 2, (step, held)
    assert world.scheduler.stats.preemptions <= 2
    finish(world)


def test_what_gave_way_puts_out_some_tokens_before_it_does_so_again() -> None:
    world = Harness(rows=2, depth=1)
    low = [world.add([place, 2], 100, tenant="a") for place in range(2)]
    for _ in range(6):
        world.step()
    moments: list[int] = []
    for turn in range(180):
        if turn % 3 == 0:
            world.add([turn % 60, 8], 1, tenant=f"b{turn}")
        retractions, tokens = low[1].retractions, len(world.seen[low[1]].tokens)
        world.step()
        if low[1].retractions > retractions:
            moments.append(tokens)
    assert len(moments) > 2
    assert all(later - earlier >= MIN_TOKENS for earlier, later in itertools.pairwise(moments))
    finish(world)


def test_the_only_request_of_a_tenant_keeps_its_row() -> None:
    world = Harness(rows=1)
    first = world.add([1, 2], 60, tenant="a")
    for _ in range(4):
        world.step()
    other = world.add([3, 4], 4, tenant="b")
    behind = world.add([5, 6], 4, tenant="a")
    world.drain()
    assert first.retractions == 0
    assert world.seen[behind].terminals and other.sequence < behind.sequence
    finish(world)


@pytest.mark.parametrize("weight", [1.0, 2.0, 5.0])
def test_prompts_are_served_by_weight_where_all_want_more(weight: float) -> None:
    world = Harness(rows=8, max_len=128, pages=400, chunked_prefill_size=24)
    done: Counter[str] = Counter()
    asked: list[Req] = []
    for _ in range(200):
        for tenant in "ab":
            while sum(world.seen[req].terminals == 0 for req in asked if req.tenant == tenant) < 4:
                prompt = [len(asked) % 60, len(asked) // 60, *range(20 if tenant == "a" else 90)]
                asked.append(world.add(prompt, 1, tenant=tenant, weight=weight if tenant == "b" else 1.0))
        world.step()
    for req in asked:
        if world.seen[req].terminals:
            done[req.tenant] += req.prompt_len + 16
    assert done["b"] / done["a"] == pytest.approx(weight, rel=0.12)
    finish(world)


def test_a_stream_of_new_tenants_starves_no_long_prompt() -> None:
    world = Harness(rows=8, max_len=512, pages=400, chunked_prefill_size=16)
    long = world.add(range(400), 1, tenant="a")
    for turn in range(120):
        world.add([turn, *range(14)], 1, tenant=f"b{turn}")
        world.step()
        if world.seen[long].tokens:
            break
    assert world.seen[long].tokens, "half of the budget is its own: 400 tokens take 50 steps"
    finish(world)


def test_outputs_count_but_leave_half_of_a_share_for_prompts() -> None:
    """Rows that decode are charged, so another's prompts get more; and never all of it."""
    world = Harness(rows=40, max_len=512, pages=2000, chunked_prefill_size=16)
    for place in range(32):
        world.add([place, 2], 400, tenant="a")
    for _ in range(20):
        world.step()
    mine = world.add([place % 60 for place in range(200)], 1, tenant="a")
    others = [
        world.add([(place + 7 * number) % 60 for place in range(400)], 1, tenant="bc"[number]) for number in (0, 1)
    ]
    for _ in range(24):
        world.step()
    got = {req.tenant: int(world.scheduler.running.planned[req.row]) for req in (mine, *others)}
    assert min(got["b"], got["c"]) > 1.5 * got["a"] and got["a"] >= 24 * 16 * 0.12, got
    for req in (mine, *others):
        world.end(req)
    world.drain()


def test_a_tenant_that_would_hold_more_takes_nothing() -> None:
    world = Harness(rows=4, pages=20, page_size=4, cache="none")
    one = world.add(range(20), 20, tenant="a")
    for _ in range(5):
        world.step()
    big = world.add(range(60), 3, tenant="b")
    world.drain()
    assert one.retractions == 0 and world.seen[big].terminals == 1
    finish(world)


def test_a_prefix_that_a_row_shares_with_one_that_stays_counts_still() -> None:
    """The newcomer would hold a larger part of the pages than of the rows, and a smaller one than the prefix is."""
    world = Harness(rows=3, pages=100, page_size=4, max_len=300, chunked_prefill_size=256)
    prefix = [place % 60 for place in range(200)]
    world.add(prefix, 1, tenant="a")
    world.drain()
    many = [world.add([*prefix, place], 60, tenant="a") for place in range(2)]
    world.add([9, 8], 60, tenant="c")
    for _ in range(4):
        world.step()
    big = world.add([place % 50 for place in range(160)], 3, tenant="b")
    for _ in range(SOON):
        world.step()
    assert big.row and [req.retractions for req in many] == [0, 1]
    finish(world)


def test_pages_run_out_the_tenant_that_holds_most_gives_way() -> None:
    """Though its requests came first: under one line for all the last to come would."""
    world = Harness(rows=8, pages=30, page_size=4, cache="none")
    many = [world.add([place, 2], 60, tenant="a") for place in range(4)]
    for _ in range(8):
        world.step()
    one = world.add([9, 8], 40, tenant="b")
    for _ in range(200):
        world.step()
        if world.seen[one].terminals:
            break
    assert one.retractions == 0 and sum(req.retractions for req in many) > 0
    finish(world)


def test_with_one_tenant_nothing_is_counted() -> None:
    world = Harness()
    reqs = [world.add([place, *range(30)], 10) for place in range(12)]
    seen: set[tuple[float, int]] = set()
    while world.scheduler.has_work:
        world.step()
        seen |= {(tenant.served, tenant.number) for tenant in world.scheduler._lifecycle.shares}
    assert seen == {(0.0, 1)}
    for req in reqs:
        world.expect(req)


def test_accounts_close_with_the_last_request_wherever_it_ends() -> None:
    world = Harness(rows=2)
    shares = world.scheduler._lifecycle.shares
    reqs = [world.add([place, 2], 20, tenant=f"t{place}") for place in range(4)]
    world.step()
    assert len(list(shares)) == 4
    for req in reversed(reqs):
        world.end(req)
        world.step()
    assert not list(shares)
    for turn in range(50):
        world.add([turn], 1, tenant=f"u{turn}")
        world.drain()
    assert shares.capacity <= 4, "columns are used again"


def entered(shares: FairShare, tenant: str, row: int = 0, weight: float = 1.0) -> Req:
    """A request of `tenant`, in `row` if that is not 0."""
    req = Req("r", 0, None, None, 0, 1, tenant=tenant, weight=weight)  # type: ignore[arg-type]
    shares.entered(req)
    if row:
        req.row = row
        shares.seated(req)
    return req


def test_shares_of_a_step_add_up_to_its_budget() -> None:
    shares = FairShare(512, 9)
    for tenant, weight in (("a", 1.0), ("b", 3.0)):
        entered(shares, tenant, weight=weight)
    assert shares.begin(list(shares)) == [128, 384]
    assert shares.begin(list(shares)[:1]) == [512]


def test_outputs_of_a_step_count_half_of_a_share_at_most() -> None:
    """Of a budget of 64 that two share."""
    shares, rows = FairShare(64, 64), range(1, 60)
    reqs = [entered(shares, "a", row) for row in rows]
    entered(shares, "b")
    shares.generated(np.array(rows))
    assert shares.tenant(reqs[0]).served == 16


def test_what_was_refused_and_has_left_claims_nothing() -> None:
    shares = FairShare(64, 9)
    tenant = shares.tenant(entered(shares, "a", 1))
    refused = entered(shares, "a")
    tenant.refused = True
    shares.left(refused)
    assert not tenant.refused and not tenant.waits
