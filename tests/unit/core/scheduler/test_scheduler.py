"""The production scheduler over the hash executor: right tokens, nothing leaked, whatever happens to requests."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from core.batch.schedule_batch import ForwardMode
from core.errors import DeadlinePassed, QueueTimeout, RequestFailed
from core.scheduler.policy import LPM_PATIENCE
from core.types.io import FinishReason
from core.types.request import Req, RequestState
from tests.support.scorecard import Scorecard
from tests.unit.core.scheduler.harness import EOS, VOCAB, Harness


def prompts(count: int, seed: int, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("mixed_chunk", [True, False])
def test_every_request_gets_its_own_tokens(depth: int, cache: str, page_size: int, mixed_chunk: bool) -> None:
    harness = Harness(depth=depth, cache=cache, page_size=page_size, mixed_chunk=mixed_chunk, pages=256 // page_size)
    reqs = [harness.add(prompt, max_tokens=1 + i % 9) for i, prompt in enumerate(prompts(40, seed=1))]
    harness.drain()
    for req in reqs:
        harness.expect(req)


def test_tiny_pool_forces_retraction_and_loses_nothing() -> None:
    harness = Harness(rows=6, pages=14, page_size=4, max_len=64)
    reqs = [harness.add(prompt, max_tokens=24) for prompt in prompts(12, seed=2, low=2, high=12)]
    harness.drain()
    assert harness.scheduler.stats.preemptions > 0
    for req in reqs:
        harness.expect(req)


def test_depth_two_keeps_a_step_submitted_while_one_runs() -> None:
    harness = Harness()
    harness.add([1, 2, 3], max_tokens=10)
    harness.step(run=False)
    assert harness.executor.in_flight == 2, "the decode step behind the prefill is planned before the prefill ran"
    assert harness.executor.batches[1].mode is ForwardMode.DECODE
    assert harness.executor.batches[1].staging.prefill_ids_cpu is None
    harness.drain()


def test_requests_that_arrive_together_share_a_prefix_in_one_step() -> None:
    harness = Harness(pages=64, chunked_prefill_size=64)
    shared = list(range(24))
    reqs = [harness.add([*shared, 40 + i], max_tokens=3) for i in range(5)]
    harness.step()
    first = harness.executor.batches[0]
    assert first.num_extend == 5
    assert first.extend_lens.tolist() == [25, 1, 1, 1, 1]
    harness.drain()
    for req in reqs:
        harness.expect(req)
    assert [req.cached_tokens for req in reqs] == [0, 24, 24, 24, 24]


def test_finished_prompt_is_found_again_and_salt_separates() -> None:
    harness = Harness()
    prompt = list(range(20))
    first = harness.add(prompt, max_tokens=4)
    harness.drain()
    again = harness.add(prompt, max_tokens=4)
    salted = harness.add(prompt, max_tokens=4, salt="tenant-b")
    harness.drain()
    assert (first.cached_tokens, again.cached_tokens, salted.cached_tokens) == (0, 16, 0)
    other = list(range(30, 50))
    harness.add(other, max_tokens=4, salt="tenant-b")
    harness.drain()
    unsalted = harness.add(other, max_tokens=4)
    harness.drain()
    assert unsalted.cached_tokens == 0, "what a tenant put there is not found without its salt"
    for req in (first, again, salted, unsalted):
        harness.expect(req)


def test_chunks_share_a_step_with_decodes() -> None:
    harness = Harness(chunked_prefill_size=8)
    early = harness.add([1, 2, 3], max_tokens=20)
    harness.step()
    late = harness.add(list(range(30)), max_tokens=3)
    harness.drain()
    mixed = [b for b in harness.executor.batches if b.mode is ForwardMode.MIXED]
    assert len(mixed) >= 3 and all(b.extend_lens[: b.num_extend].sum() <= 8 for b in mixed)
    harness.expect(early)
    harness.expect(late)


@pytest.mark.parametrize("phase", range(12))
@pytest.mark.parametrize("run", [True, False])
def test_abort_in_every_phase_frees_at_once(phase: int, run: bool) -> None:
    harness = Harness(rows=2, pages=32, chunked_prefill_size=4)
    doomed = harness.add(list(range(14)), max_tokens=6)
    other = harness.add(list(range(20, 29)), max_tokens=6)
    for _ in range(phase):
        harness.step(run=run or harness.executor.in_flight == 2)
    harness.end(doomed)
    harness.step()
    assert doomed.state is RequestState.FINISHED and doomed.row == 0
    harness.drain()
    seen = harness.seen[doomed]
    assert seen.terminals == 1
    harness.expect(other)
    harness.expect(doomed, len(seen.tokens))


def test_abort_twice_and_after_the_end_is_harmless() -> None:
    harness = Harness()
    req = harness.add([5, 6], max_tokens=2)
    harness.end(req)
    harness.end(req)
    harness.drain()
    harness.end(req)
    harness.step()
    assert harness.seen[req].terminals == 1
    assert harness.seen[req].reason is FinishReason.CANCELLED


def test_row_reused_while_the_old_owner_is_in_flight() -> None:
    """D3: the overshoot step of a finished request runs after its row has a new owner."""
    harness = Harness(rows=1, pages=16)
    first = harness.add([1, 2, 3], max_tokens=50)
    for _ in range(4):
        harness.step()
    second = harness.add([9, 8, 7], max_tokens=5)
    harness.end(first)
    harness.drain()
    assert harness.scheduler.stats.stale_results > 0
    harness.expect(second)


def test_stop_token_ends_an_output_and_its_overshoot_is_dropped() -> None:
    free = Harness()
    probe = free.add([3, 1, 4], max_tokens=30)
    free.drain()
    tokens = free.seen[probe].tokens
    stop = tokens[7]
    harness = Harness()
    req = harness.add([3, 1, 4], max_tokens=30, stop_token_ids=(stop,))
    harness.drain()
    assert harness.seen[req].reason is FinishReason.STOP
    assert harness.seen[req].tokens == tokens[: tokens.index(stop) + 1]


def test_eos_ends_unless_ignored() -> None:
    for ignore in (True, False):
        harness = Harness()
        reqs = [harness.add(p, max_tokens=60, ignore_eos=ignore) for p in prompts(6, seed=5, high=5)]
        harness.drain()
        for req in reqs:
            seen = harness.seen[req]
            assert (EOS in seen.tokens[:-1]) <= ignore
            if seen.reason is FinishReason.STOP:
                assert not ignore and seen.tokens[-1] == EOS
    assert any(harness.seen[req].reason is FinishReason.STOP for req in reqs)


def test_deadline_and_queue_timeout() -> None:
    harness = Harness(rows=1, pages=32)
    running = harness.add([1], max_tokens=40, deadline=12.0)
    late = harness.add([2], max_tokens=3, queue_deadline=5.0)
    patient = harness.add([3], max_tokens=3)
    harness.drain()
    assert isinstance(harness.seen[running].error, DeadlinePassed)
    assert isinstance(harness.seen[late].error, QueueTimeout)
    harness.expect(running, len(harness.seen[running].tokens))
    harness.expect(patient)


def test_queue_timeout_does_not_end_a_request_that_was_scheduled() -> None:
    harness = Harness(rows=2, pages=7, max_len=32)
    reqs = [harness.add(p, max_tokens=16, queue_deadline=5.0) for p in prompts(2, seed=9, low=4, high=6)]
    harness.drain()
    assert harness.now > 5.0 and harness.scheduler.stats.preemptions > 0
    for req in reqs:
        harness.expect(req)


def test_non_finite_row_fails_alone() -> None:
    harness = Harness()
    bad, good = harness.add([1, 2], max_tokens=6), harness.add([3, 4], max_tokens=6)
    harness.step()
    harness.executor.mutate = lambda r: replace(r, non_finite=r.rows == 1)
    harness.step()
    harness.executor.mutate = None
    harness.drain()
    assert isinstance(harness.seen[bad].error, RequestFailed)
    harness.expect(good)


def test_failed_step_is_raised_to_the_shell() -> None:
    harness = Harness()
    harness.add([1, 2], max_tokens=6)
    harness.executor.mutate = lambda r: replace(r, error=RuntimeError("device lost"))
    harness.step()
    with pytest.raises(RuntimeError, match="device lost"):
        harness.step()


def test_who_ended_in_the_step_that_failed_is_not_forgotten() -> None:
    """Its last token arrives together with the failure, so nothing of that step is emitted any more."""
    harness = Harness()
    done, other = harness.add([1, 2], max_tokens=1), harness.add([3, 4], max_tokens=6)
    harness.step(run=False)
    harness.step(run=False)
    assert harness.executor.run_one()
    harness.executor.mutate = lambda r: replace(r, error=RuntimeError("device lost"))
    assert harness.executor.run_one()
    with pytest.raises(RuntimeError, match="device lost"):
        harness.step()
    assert harness.seen[done].terminals == 0
    assert set(harness.scheduler.abandon()) == {done, other}


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_is_planned_past_the_last_token(depth: int) -> None:
    harness = Harness(depth=depth)
    harness.add([1, 2, 3], max_tokens=5)
    harness.drain()
    assert [int(batch.seq_lens[0]) for batch in harness.executor.batches] == [3, 4, 5, 6, 7]


def test_priority_and_arrival_order() -> None:
    harness = Harness(rows=1, pages=32, policy="priority")
    order = []
    reqs = [harness.add([i], max_tokens=2, priority=p) for i, p in enumerate([5, 1, 5, 0])]
    while harness.scheduler.has_work:
        harness.step()
        order += [r for r in reqs if harness.seen[r].terminals and r not in order]
    assert [reqs.index(r) for r in order] == [3, 1, 0, 2]


def test_longest_prefix_first_but_nobody_starves() -> None:
    harness = Harness(rows=1, pages=64, policy="lpm")
    hot = list(range(16))
    harness.add(hot, max_tokens=1)
    harness.drain()
    cold = harness.add([60] * 10, max_tokens=1)
    hits = [harness.add([*hot, i], max_tokens=1) for i in range(50)]
    done_before_cold = 0
    while not harness.seen[cold].terminals:
        harness.step()
        done_before_cold = sum(harness.seen[h].terminals for h in hits)
    assert 0 < done_before_cold < 50
    harness.drain()


@pytest.mark.parametrize(("policy", "bound"), [("fcfs", 0), ("priority", 0), ("lpm", LPM_PATIENCE)])
def test_waits_are_bounded_and_budgets_kept(policy: str, bound: int, seed: int, scorecard: Scorecard) -> None:
    """Twice what it can serve, half of it with a hot prefix: how many of its class, that came later, went before it?"""
    rng = random.Random(seed)
    harness = Harness(rows=4, pages=14, policy=policy, chunked_prefill_size=8)
    hot, reqs = [1] * 8, list[Req]()
    overtaken: Counter[Req] = Counter()
    for _ in range(300):
        if rng.random() < 0.7:
            prompt = [*hot, rng.randrange(60)] if rng.random() < 0.5 else [rng.randrange(60) for _ in range(12)]
            reqs.append(harness.add(prompt, max_tokens=rng.randint(1, 24), priority=rng.randrange(2)))
        waiting = [req for req in reqs if req.scheduled_at is None]
        harness.step()
        for admitted in (req for req in waiting if req.scheduled_at is not None):
            overtaken.update(req for req in waiting if req.scheduled_at is None and _behind(admitted, req, policy))
    harness.drain(10_000)
    tokens = [int(batch.extend_lens[: batch.num_extend].sum()) for batch in harness.executor.batches]
    scorecard(7, f"{policy}: most prompt tokens in a step, of a budget of 8", max(tokens), at_most=8)
    for req in reqs:
        harness.expect(req)
    most = max(overtaken.values(), default=0)
    scorecard(7, f"{policy}: later ones of its class before it, at most", most, at_most=bound)
    preempted = sum(req.retractions > 0 for req in reqs)
    scorecard(7, f"{policy}: preempted, all of which finished", preempted, at_least=1)


def _behind(admitted: Req, waiting: Req, policy: str) -> bool:
    same_class = policy != "priority" or admitted.priority == waiting.priority
    return same_class and admitted.sequence > waiting.sequence


def test_decode_is_planned_without_any_token_on_the_host() -> None:
    """Law 7: a decode step carries no ids; and law 3: a submitted batch never changes afterwards."""
    harness = Harness()
    for prompt in prompts(6, seed=11):
        harness.add(prompt, max_tokens=12)
    copies: list[tuple[object, np.ndarray, np.ndarray]] = []
    while harness.scheduler.has_work:
        harness.step()
        for batch in harness.executor.batches[len(copies) :]:
            copies.append((batch, batch.rows.copy(), batch.seq_lens.copy()))
    for batch, rows, lens in copies:
        assert (batch.rows == rows).all() and (batch.seq_lens == lens).all()  # type: ignore[attr-defined]


def test_random_storm(seed: int) -> None:
    """Arrivals, aborts and slow devices at random, small pools: all end, with a correct prefix of their tokens."""
    for case in range(25):
        rng = random.Random(seed * 1000 + case)
        rows, page_size = rng.randint(1, 5), rng.choice([1, 2, 4])
        pages = rng.randint(20, 40) // page_size + 2
        harness = Harness(
            rows=rows, pages=pages, page_size=page_size, max_len=64, cache=rng.choice(["radix", "none"]),
            depth=rng.choice([1, 2]), chunked_prefill_size=rng.choice([1, 3, 16]), policy=rng.choice(["fcfs", "lpm",
            "priority"]), mixed_chunk=rng.random() < 0.7,
        )  # fmt: skip
        limit = pages * page_size
        reqs = []
        for _ in range(120):
            if rng.random() < 0.3:
                prompt = [rng.randrange(4) for _ in range(rng.randint(1, limit // 2))]
                reqs.append(
                    harness.add(prompt, max_tokens=rng.randint(1, limit - len(prompt)), priority=rng.randrange(3))
                )
            if reqs and rng.random() < 0.1:
                harness.end(rng.choice(reqs))
            harness.step(run=rng.random() < 0.8)
        harness.drain()
        for req in reqs:
            seen = harness.seen[req]
            count = len(seen.tokens) if seen.reason is FinishReason.CANCELLED else None
            harness.expect(req, count)
