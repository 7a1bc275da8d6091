"""Which waiting request is let in next, what is left free for those who run, and what coming back costs."""

from __future__ import annotations

import numpy as np
import pytest

from core.types.request import Req
from tests.unit.core.scheduler.harness import Harness

PROMPT, OTHER = list(range(16)), list(range(30, 46))


@pytest.mark.parametrize(
    ("kept", "asked", "first"), [("", "", 1), ("b", "b", 1), ("b", "", 0), ("", "b", 0), ("a", "b", 0)]
)
def test_a_prefix_counts_only_under_the_salt_it_is_kept_under(kept: str, asked: str, first: int) -> None:
    """Under `lpm` the younger of two goes first exactly if its prefix is cached for its own tenant."""
    harness = Harness(rows=1, policy="lpm")
    harness.add(PROMPT, max_tokens=1, salt=kept)
    harness.drain()
    reqs = [harness.add([*prompt, 50], max_tokens=1, salt=asked) for prompt in (OTHER, PROMPT)]
    harness.step()
    assert [req.scheduled_at is not None for req in reqs] == [first == 0, first == 1]
    harness.drain()
    for req in reqs:
        harness.expect(req)


class Pair:
    """Two requests that fill a pool of 16 pages between them in 30 steps, and a third that would fit beside one."""

    STEPS = 30

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.stays = harness.add([1, 2, 3, 4], max_tokens=60, priority=1)
        self.goes = harness.add([5, 6, 7, 8], max_tokens=55, priority=2)

    def run(self, *, cancel: bool) -> Req:
        """Let the second one go, by its client or by retraction; then the third is queued, before all others."""
        before = self.harness.scheduler.stats.preemptions
        for step in range(self.STEPS):
            if cancel and step == self.STEPS - 1:
                self.harness.end(self.goes)
            self.harness.step()
        assert self.harness.scheduler.stats.preemptions - before == (not cancel)
        assert self.goes.row == 0 and self.harness.memory.obtainable_pages == 7, "the same in both cases"
        return self.harness.add([60] * 16, max_tokens=16, priority=0)


def roomy() -> Harness:
    return Harness(rows=4, pages=16, depth=1, max_len=160, cache="none", policy="priority", priority_preemption=False)


def test_a_retraction_keeps_pages_for_those_who_run() -> None:
    """Beside the same rest and with as many free pages, the same request waits exactly if pages had run out before."""
    for cancel in (True, False):
        harness = roomy()
        pair = Pair(harness)
        newcomer = pair.run(cancel=cancel)
        harness.step()
        assert (newcomer.scheduled_at is not None) == cancel
        while newcomer.scheduled_at is None:
            assert pair.stays.row, "nothing is kept free for one that ended"
            harness.step()
        harness.drain()
        harness.expect(newcomer)
        harness.expect(pair.stays)


def test_what_a_retraction_keeps_free_is_given_back_by_quiet_steps() -> None:
    harness = roomy()
    Pair(harness).run(cancel=False)
    harness.drain()
    harness.add([9], max_tokens=60)
    quiet = harness.drain()
    newcomer = Pair(harness).run(cancel=True)
    harness.step()
    assert quiet >= 60 and newcomer.scheduled_at is not None
    harness.drain()


@pytest.mark.parametrize("cache", ["radix", "none"])
def test_recomputed_tokens_are_those_that_were_computed_again(cache: str) -> None:
    """What a retracted request finds in the cache when it comes back, it does not compute again."""
    rng = np.random.default_rng(7)
    harness = Harness(rows=6, pages=14, max_len=64, cache=cache)
    prompts = [rng.integers(0, 64, size).tolist() for size in rng.integers(2, 12, 12)]
    reqs = [harness.add(prompt, max_tokens=24) for prompt in prompts]
    harness.drain()
    stats = harness.scheduler.stats
    found = sum(
        int(prefix)
        for batch in harness.executor.batches
        for row, prefix in zip(batch.rows[: batch.num_extend], batch.prefix_lens[: batch.num_extend], strict=True)
        if row in batch.fresh_rows
    )
    assert stats.preemptions == sum(req.retractions for req in reqs) > 0
    assert stats.cached_tokens == sum(req.cached_tokens for req in reqs) == 0, "prompts differ"
    assert (found > 0) == (cache == "radix")
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.recomputed_tokens == stats.computed_tokens["prefill"] - stats.prompt_tokens
    for req in reqs:
        harness.expect(req)


@pytest.mark.parametrize(("outputs", "fits"), [(8, True), (40, False)])
def test_what_a_newcomer_may_put_out_counts_before_it_is_let_in(outputs: int, fits: bool) -> None:
    """One page is free for its prompt either way, behind what is kept for the one that runs."""
    harness = roomy()
    pair = Pair(harness)
    harness.end(pair.run(cancel=False))
    newcomer = harness.add([50], max_tokens=outputs, priority=0)
    harness.step()
    assert (newcomer.scheduled_at is not None) == fits
    harness.drain()


def test_nothing_is_kept_free_for_others_where_there_are_none() -> None:
    """A request that needs the whole pool gets it at once, also where pages have just run out."""
    harness = roomy()
    newcomer = Pair(harness).run(cancel=False)
    for req in list(harness.seen):
        harness.end(req)
    harness.drain()
    assert newcomer.scheduled_at is None
    whole = harness.add([8] * 60, max_tokens=4)
    harness.step()
    assert whole.scheduled_at is not None
    harness.drain()
    harness.expect(whole)
