"""Without mixed steps: chunks and decodes each have a share, whatever the other side does."""

from __future__ import annotations

import pytest

from core.batch.schedule_batch import ForwardMode
from core.config import PREFILLS_PER_DECODE
from core.types.io import Pooling
from core.types.request import Req
from tests.unit.core.scheduler.harness import VOCAB, Harness

ROUND = PREFILLS_PER_DECODE + 1


def modes(world: Harness, since: int = 0) -> list[bool]:
    """Of each step since then: whether it decoded."""
    return [batch.mode is ForwardMode.DECODE for batch in world.executor.batches[since:]]


def flood(world: Harness, steps: int, kind: str) -> None:
    """As many prompts as can be prefilled, and one more, in every step."""
    for step in range(steps):
        while len(world.scheduler.waiting) + len(world.scheduler.intake) < 2:
            req = world.add([(step * 7 + at) % VOCAB for at in range(20)], max_tokens=1)
            if kind == "embeddings":
                req.max_new_tokens, req.pooling = 0, Pooling.LAST
        world.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_both_sides_get_their_share_under_endless_arrivals(depth: int) -> None:
    world = Harness(rows=8, pages=256, depth=depth, cache="none", mixed_chunk=False)
    reqs = [world.add([i, 2, 3], max_tokens=100) for i in range(3)]
    for _ in range(5):
        world.step()
    before, tokens = len(world.executor.batches), len(world.seen[reqs[0]].tokens)
    flood(world, 20 * ROUND, "prompts")
    decodes = modes(world, before)
    assert len(decodes) >= 20 * ROUND - depth
    for at in range(len(decodes) - ROUND):
        assert sum(decodes[at : at + ROUND]) == 1, f"steps {at} on: {decodes[at : at + ROUND]}"
    assert len(world.seen[reqs[0]].tokens) - tokens >= 20 - 1
    world.drain()
    for req in world.seen:
        world.expect(req)


def test_with_nothing_to_decode_every_step_prefills() -> None:
    world = Harness(rows=8, pages=256, cache="none", mixed_chunk=False)
    flood(world, 40, "prompts")
    assert len(world.executor.batches) >= 38 and not any(modes(world))


def test_with_nothing_to_prefill_every_step_decodes() -> None:
    world = Harness(rows=8, pages=256, cache="none", mixed_chunk=False)
    world.add([1, 2, 3], max_tokens=60)
    world.drain()
    assert modes(world) == [False, *[True] * 59]


def test_a_row_that_becomes_ready_waits_from_then_on() -> None:
    """Prefill steps that made no row wait are no debt."""
    world = Harness(rows=8, pages=256, depth=1, cache="none", mixed_chunk=False)
    req = world.add(list(range(60)) + list(range(60)), max_tokens=3)
    world.add(list(range(60)) + list(range(60)), max_tokens=3)
    world.drain()
    long = 120 // 16 + 1
    first = modes(world).index(True)
    assert first == 7 + 1 + PREFILLS_PER_DECODE, (first, long)
    world.expect(req)


@pytest.mark.parametrize("mixed_chunk", [True, False])
@pytest.mark.parametrize("kind", ["prompts", "embeddings"])
def test_no_flood_holds_up_a_decode(kind: str, mixed_chunk: bool) -> None:
    world = Harness(rows=8, pages=256, depth=1, cache="none", mixed_chunk=mixed_chunk)
    req = world.add([1, 2, 3], max_tokens=100)
    for _ in range(3):
        world.step()
    gaps: list[int] = []
    last, tokens = 0, len(world.seen[req].tokens)
    for step in range(60):
        flood(world, 1, kind)
        if len(world.seen[req].tokens) > tokens:
            gaps.append(step - last)
            last, tokens = step, len(world.seen[req].tokens)
    assert max(gaps) <= (1 if mixed_chunk else ROUND)


def test_the_samples_of_one_request_hold_up_no_decode() -> None:
    """64 samples wait at once: the row that decodes takes part in every step, and who came after them is not passed."""
    world = Harness(rows=8, pages=256, depth=1)
    req = world.add([1, 2, 3], max_tokens=60)
    for _ in range(3):
        world.step()
    group = [world.add(range(20), max_tokens=4) for _ in range(64)]
    later = world.add([5, 6], max_tokens=1)
    for _ in range(20):
        tokens = len(world.seen[req].tokens)
        world.step()
        assert len(world.seen[req].tokens) == tokens + 1
    world.drain()
    assert _order(group) + 1 == _order([*group, later])
    for each in (req, *group, later):
        world.expect(each)


def _order(reqs: list[Req]) -> int:
    """How many of them were admitted in the order of their arrival."""
    admitted = [req.scheduled_at for req in reqs]
    return len(admitted) if admitted == sorted(admitted, key=lambda at: at or 0.0) else -1


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_request_among_favourites_is_admitted_within_a_bound(policy: str) -> None:
    """Cached prompts arrive for ever; under `lpm` each is a better match than the cold request."""
    world = Harness(rows=2, pages=256, depth=1, policy=policy, chunked_prefill_size=64)
    hot = list(range(24))
    world.add(hot, max_tokens=1)
    world.drain()
    for at in range(3):
        world.add([*hot, at], max_tokens=2)
    cold = world.add(range(40, 60), max_tokens=2)
    for step in range(200):
        while len(world.scheduler.waiting) + len(world.scheduler.intake) < 6:
            world.add([*hot, step % VOCAB], max_tokens=2)
        world.step()
        if world.seen[cold].terminals:
            break
    world.drain()
    assert step < 60
    world.expect(cold)
