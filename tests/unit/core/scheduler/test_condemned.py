"""A request whose numbers are wrong leaves nothing behind: what it computed, also what others read already, is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from core.batch.result import StepResult, VectorResult
from core.errors import RequestFailed
from core.memory.recurrent.state_slots import StateSlots
from core.memory.recurrent.state_snapshots import Tracking
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import WindowPages
from core.scheduler.outputs import Ending
from core.types.io import FinishReason, Pooling
from core.types.request import Req
from tests.unit.core.scheduler.harness import Harness

PROMPT = list(range(1, 15))
"""Three whole pages of four tokens, and two tokens more."""

Spoil = Callable[[StepResult, np.ndarray], StepResult]


def nan(result: StepResult, rows: np.ndarray) -> StepResult:
    return replace(result, non_finite=rows)


def violated(result: StepResult, rows: np.ndarray) -> StepResult:
    return replace(result, violated=rows)


def fail(harness: Harness, *reqs: Req, spoil: Spoil = nan) -> None:
    """From the next step that the device executes on, the rows of `reqs` are spoiled, until the scheduler has heard."""
    owners = {(req.row, req.generation) for req in reqs}

    def mutate(result: StepResult) -> StepResult:
        hit = [owner in owners for owner in zip(result.rows.tolist(), result.generations.tolist(), strict=True)]
        return spoil(result, np.array(hit, np.bool_))

    harness.executor.mutate = mutate
    for _ in range(3):
        harness.step()
    harness.executor.mutate = None
    for req in reqs:
        assert isinstance(harness.seen[req].error, RequestFailed), req


def until(harness: Harness, req: Req, tokens: int) -> None:
    while len(harness.seen[req].tokens) < tokens:
        harness.step()


@pytest.mark.parametrize("spoil", [nan, violated])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_nothing_of_a_failed_request_is_found(tokens: int, spoil: Spoil) -> None:
    """Neither its prompt, which was offered while it was computed, nor what it decoded; a sound one before it is."""
    harness = Harness()
    before = harness.add(PROMPT[:8], max_tokens=1)
    harness.drain()
    sound = harness.memory.cache.cached_pages
    bad = harness.add(PROMPT, max_tokens=40)
    harness.step(run=False)
    until(harness, bad, tokens)
    fail(harness, bad, spoil=spoil)
    harness.drain()
    assert harness.memory.cache.cached_pages == sound == 2
    again = harness.add(PROMPT, max_tokens=12)
    harness.drain()
    assert (before.cached_tokens, bad.cached_tokens, again.cached_tokens) == (0, 8, 8)
    harness.expect(again)


def test_where_it_fails_first_everything_goes() -> None:
    harness = Harness()
    bad = harness.add(PROMPT, max_tokens=40)
    until(harness, bad, 5)
    fail(harness, bad)
    harness.drain()
    assert harness.memory.cache.cached_pages == 0 and harness.memory.allocator.held == 0


def test_what_it_decoded_goes_where_its_prompt_was_no_page() -> None:
    harness = Harness()
    bad = harness.add(PROMPT[:3], max_tokens=40)
    until(harness, bad, 12)
    fail(harness, bad)
    harness.drain()
    assert harness.memory.cache.cached_pages == 0


def test_pages_of_an_earlier_admission_go_as_well() -> None:
    """It gave way once, so what it found when it came back is its own work."""
    harness = Harness()
    bad = harness.add(PROMPT, max_tokens=40)
    until(harness, bad, 7)
    harness.scheduler._lifecycle.retract(bad)
    until(harness, bad, 9)
    assert harness.memory.pages_found(np.array([bad.row]))[0] * harness.memory.page_size > 8
    fail(harness, bad)
    harness.drain()
    assert harness.memory.cache.cached_pages == 0


def test_readers_are_computed_again_behind_a_clean_prefix() -> None:
    """Two read its pages, of which one has answered already, and one reads what one of those put behind them."""
    harness = Harness(chunked_prefill_size=64)
    bad = harness.add(PROMPT, max_tokens=40)
    until(harness, bad, 2)
    readers = [harness.add([*PROMPT[:12], 20 + i, 30, 31, 32, 33], max_tokens=20) for i in range(2)]
    until(harness, readers[0], 3)
    neighbour = harness.add([50, 51, 52, 53, 54], max_tokens=20)
    below = harness.add([*readers[0].prompt.tolist(), 9], max_tokens=20)
    harness.step(run=False)
    assert [req.cached_tokens for req in (*readers, below)] == [12, 12, 16]
    sent = [list(harness.seen[req].tokens) for req in readers]
    harness.executor.run_one()
    fail(harness, bad)
    assert [req.retractions for req in (*readers, below, neighbour)] == [1, 1, 1, 0]
    assert harness.scheduler.stats.preemptions == 3
    assert [req.computed_from for req in readers] == [0, 12], "the first computes again what the second finds"
    harness.drain()
    for req, tokens in zip(readers, sent, strict=True):
        assert harness.seen[req].tokens[: len(tokens)] == tokens, "tokens that were sent stand"
    for req in (*readers, below, neighbour):
        harness.expect(req)


def test_the_owner_of_shared_pages_is_blamed_and_not_its_readers() -> None:
    """What it computed is NaN, so theirs is too, in the same step; only the first of them is to fail."""
    harness = Harness(chunked_prefill_size=64)
    bad = harness.add(PROMPT, max_tokens=40)
    readers = [harness.add([*PROMPT[:12], 20 + i], max_tokens=20) for i in range(3)]
    harness.step(run=False)
    assert [req.cached_tokens for req in readers] == [12, 12, 12]
    harness.executor.mutate = lambda result: nan(result, np.ones(len(result.rows), np.bool_))
    harness.executor.run_one()
    harness.executor.mutate = None
    harness.drain()
    assert isinstance(harness.seen[bad].error, RequestFailed)
    for req in readers:
        harness.expect(req)


def test_a_prefix_that_nobody_vouched_for_goes_with_its_first_victim() -> None:
    """Its owner left in the middle of the prompt: no logits ever said whether it is sound."""
    harness = Harness(chunked_prefill_size=8)
    left = harness.add(PROMPT, max_tokens=4)
    harness.step()
    harness.step(run=False)
    harness.end(left)
    harness.drain()
    assert harness.memory.cache.cached_pages >= 2
    victim = harness.add(PROMPT, max_tokens=4)
    harness.step(run=False)
    assert victim.cached_tokens >= 8
    fail(harness, victim)
    harness.drain()
    assert harness.memory.cache.cached_pages == 0
    last = harness.add(PROMPT, max_tokens=4)
    harness.drain()
    assert last.cached_tokens == 0
    harness.expect(last)


def test_what_was_vouched_for_stays_before_what_was_not() -> None:
    """Two pages gave finite logits, and those behind them were left in the middle of a prompt."""
    harness = Harness(chunked_prefill_size=8)
    sound = harness.add(PROMPT[:9], max_tokens=1)
    harness.drain()
    left = harness.add([*PROMPT, *range(20, 40)], max_tokens=4)
    harness.step(run=False)
    harness.end(left)
    harness.drain()
    assert harness.memory.cache.cached_pages > 2
    victim = harness.add([*PROMPT, *range(20, 40)], max_tokens=4)
    harness.step(run=False)
    assert victim.cached_tokens > 8
    while harness.scheduler._lifecycle.running.prefilling().size:
        harness.step(run=False)
        harness.executor.run_one()
    fail(harness, victim)
    harness.drain()
    assert harness.memory.cache.cached_pages == 2
    harness.expect(sound)


def test_a_prefix_that_gave_finite_logits_stays() -> None:
    """One request of many behind a system prompt fails, and the others neither lose it nor are disturbed."""
    harness = Harness()
    first = harness.add(PROMPT[:12], max_tokens=20)
    until(harness, first, 1)
    bad, good = (harness.add([*PROMPT[:12], 40 + i], max_tokens=20) for i in range(2))
    harness.step(run=False)
    assert (bad.cached_tokens, good.cached_tokens) == (12, 12)
    fail(harness, bad)
    assert (first.retractions, good.retractions) == (0, 0)
    harness.drain()
    later = harness.add([*PROMPT[:12], 60], max_tokens=2)
    harness.drain()
    assert later.cached_tokens == 12
    for req in (first, good, later):
        harness.expect(req)


def test_a_page_is_vouched_for_by_its_own_logits_only() -> None:
    """The very pages of a sound request serve one that leaves before it has logits; what it leaves is unproved."""
    harness = Harness(rows=1, pages=4, max_len=20, chunked_prefill_size=8)
    harness.add([9, *PROMPT, 9], max_tokens=1)
    harness.drain()
    assert harness.memory.sound.leading(np.arange(1, 5)) == 4, "every page of the pool is vouched for"
    left = harness.add(PROMPT, max_tokens=2)
    harness.step()
    harness.step(run=False)
    harness.end(left)
    harness.drain()
    victim = harness.add(PROMPT, max_tokens=2)
    harness.step(run=False)
    assert victim.cached_tokens >= 8
    fail(harness, victim)
    harness.drain()
    assert harness.memory.cache.peek(np.array(PROMPT), 12, "") == 0


def test_tokens_that_no_result_vouches_for_are_not_cached() -> None:
    """A client leaves while a step is in flight; what that step writes is not offered to anybody."""
    harness = Harness(page_size=1)
    req = harness.add([1, 2, 3], max_tokens=20)
    until(harness, req, 4)
    harness.step(run=False)
    known = 3 + len(harness.seen[req].tokens)
    harness.end(req)
    harness.drain()
    assert harness.memory.cache.cached_pages == known - 1


def test_a_failed_embedding_leaves_nothing() -> None:
    harness = Harness()
    req = harness.add(PROMPT, max_tokens=1)
    req.pooling, req.max_new_tokens = Pooling.LAST, 0
    good = harness.add([30, *PROMPT], max_tokens=1)
    good.pooling, good.max_new_tokens = Pooling.LAST, 0

    def embed(result: StepResult) -> StepResult:
        pooling = harness.executor.batches[-1].pooling
        if pooling is None or not len(pooling.rows):
            return result
        values = np.ones((len(pooling.rows), 2), np.float32)
        values[pooling.rows == req.row] = np.nan
        return replace(result, vectors=VectorResult(pooling.rows, pooling.generations, values))

    harness.executor.mutate = embed
    harness.executor.depth = 1
    harness.drain()
    assert isinstance(harness.seen[req].error, RequestFailed) and good.vector is not None
    assert harness.memory.cache.peek(np.array(PROMPT), 12, "") == 0
    assert harness.memory.cache.peek(np.array([30, *PROMPT]), 12, "") == 12


@pytest.mark.parametrize("kind", ["states", "windows"])
def test_what_companions_keep_for_its_pages_goes(kind: str) -> None:
    """State snapshots and window pages of the failed request; those of the sound prefix stay."""
    states = StateSlots(12, 9, Tracking(4, 4, 2))
    windows = WindowPages(64, 64, 9, WindowBounds(8, 4, 16))
    harness = Harness(companions=[states if kind == "states" else windows])
    harness.add(PROMPT[:9], max_tokens=1)
    harness.drain()
    kept = [stats.cached for stats in harness.memory.stats()]
    bad = harness.add(PROMPT, max_tokens=40)
    until(harness, bad, 12)
    assert bad.cached_tokens == 8
    fail(harness, bad)
    harness.drain()
    assert [stats.cached for stats in harness.memory.stats()] == kept
    again = harness.add(PROMPT, max_tokens=3)
    harness.drain()
    assert again.cached_tokens == 8
    harness.expect(again)


def test_samples_of_one_request_without_a_prefix_cache() -> None:
    harness = Harness(cache="none")
    salt = harness.memory.cache.namespace("", "group")
    samples = [harness.add(PROMPT, max_tokens=10) for _ in range(3)]
    for req in samples:
        req.salt = salt
    harness.step(run=False)
    assert [req.cached_tokens for req in samples] == [0, 12, 12]
    fail(harness, samples[0])
    harness.drain()
    for req in samples[1:]:
        assert req.retractions == 1
        harness.expect(req)


@pytest.mark.parametrize("sampled", [False, True])
def test_an_output_of_a_condemned_prompt_keeps_what_its_own_logits_vouch_for(sampled: bool) -> None:
    """Another output of the same prompt failed. This one is in the middle of it, or has had its first token."""
    harness = Harness(chunked_prefill_size=8)
    sibling = harness.add(PROMPT, max_tokens=40)
    until(harness, sibling, 1) if sampled else harness.step(run=False)
    assert harness.memory.cache.cached_pages > 0 and bool(harness.seen[sibling].tokens) == sampled
    harness.scheduler.intake.end(Ending(sibling, FinishReason.CANCELLED, condemned=True))
    harness.drain()
    assert harness.seen[sibling].reason is FinishReason.CANCELLED
    assert (harness.memory.cache.cached_pages > 0) == sampled
    again = harness.add(PROMPT, max_tokens=3)
    harness.drain()
    harness.expect(again)
