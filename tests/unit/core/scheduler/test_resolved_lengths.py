"""Rows that only drafts in flight keep from their next step: it is planned once the lengths are published."""

from __future__ import annotations

import numpy as np
import pytest

from core.batch.result import StepResult
from core.types.io import FinishReason
from core.types.request import Req
from tests.support.fakes.hash_executor import reference
from tests.support.fakes.speculating_executor import Adversary, SpeculatingExecutor, always_right
from tests.unit.core.scheduler.harness import VOCAB, Harness
from tests.unit.core.scheduler.test_speculation import always_wrong, like_a_coin


class LateResults(SpeculatingExecutor):
    """Publishes lengths as soon as a step has run, and brings its results only while `brings` is set."""

    brings = True

    def completed(self) -> list[StepResult]:
        return super().completed() if self.brings else []


def harness(adversary: Adversary, **options: object) -> tuple[Harness, LateResults]:
    kind = type("Late", (LateResults,), {"adversary": staticmethod(adversary)})
    world = Harness(**{"drafts": 4, "executor": kind} | options)  # type: ignore[arg-type]
    assert isinstance(world.executor, LateResults)
    return world, world.executor


def steps_of(world: Harness) -> int:
    return len(world.executor.batches)


@pytest.mark.parametrize("adversary", [always_wrong, always_right], ids=["wrong", "right"])
def test_a_row_that_drafts_may_have_ended_goes_on_when_they_were_wrong(adversary: Adversary) -> None:
    """Four tokens: one with the prompt, and a step with two drafts may bring the others."""
    world, device = harness(adversary)
    req = world.add(range(1, 9), max_tokens=4)
    world.step()
    device.brings = False
    world.scheduler.step(world.now)
    assert steps_of(world) == 2, "planned before the first token is known"
    device.brings = True
    world.scheduler.step(world.now)
    device.brings = False
    device.run_one()
    world.scheduler.step(world.now)
    # The lengths of step 2 say whether there is a step 3; its tokens are not here.
    assert steps_of(world) == (3 if adversary is always_wrong else 2)
    device.brings = True
    world.drain()
    world.expect(req)


def test_a_row_that_is_short_of_pages_only_by_its_drafts_goes_on_when_they_were_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both need all 13 pages of two tokens at their ends; drafts in flight take some of them before."""
    world, device = harness(always_wrong, depth=2, pages=13, page_size=2, cache="none", rows=4)
    reqs = [world.add([1, 2, 3, 4, 5, 6, 7], max_tokens=14), world.add([13, 14, 15], max_tokens=7)]
    running, gained = world.scheduler.running, 0
    # No row waits for its end here: only for pages.
    monkeypatch.setattr(running, "waits_for_lengths", lambda: False)
    while world.scheduler.has_work:
        before, planned = running.resolved, steps_of(world)
        device.brings = False
        world.step(run=False)
        gained += running.resolved > before and steps_of(world) > planned
        device.brings = True
        world.step()
    assert gained, "no step was planned on lengths alone"
    for req in reqs:
        world.expect(req)
        assert req.retractions == 0


def test_ends_and_new_owners_between_lengths_and_results(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world, device = harness(like_a_coin(rng), rows=3, pages=32, page_size=4)
    reqs: list[Req] = []
    steps, resolved = 0, 0
    # One seed in fifty meets no such lengths in so few steps.
    while steps < 200 or (not resolved and steps < 2000):
        steps += 1
        if rng.random() < 0.4 and (len(reqs) < 60 or not resolved):
            reqs.append(world.add(rng.integers(1, VOCAB, rng.integers(1, 20)), max_tokens=int(rng.integers(1, 12))))
        if reqs and rng.random() < 0.1:
            world.end(reqs[rng.integers(len(reqs))])
        device.brings = bool(rng.random() < 0.5)
        world.step(run=bool(rng.random() < 0.7))
        resolved += bool(world.scheduler.running.unseen.any())
    device.brings = True
    world.drain()
    assert resolved, "no lengths came before their results"
    for req in reqs:
        seen = world.seen[req]
        assert seen.terminals == 1 and seen.tokens == reference(req.prompt.tolist(), len(seen.tokens), VOCAB)
        if seen.reason is FinishReason.LENGTH:
            assert len(seen.tokens) == req.max_new_tokens
