"""The scheduler with drafts: bounds instead of lengths, several tokens at once, and the outputs of a plain run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.types.io import FinishReason
from core.types.request import Req
from tests.support.fakes.hash_executor import reference
from tests.support.fakes.speculating_executor import Adversary, SpeculatingExecutor, always_right
from tests.support.fakes.step_grammar import StepGrammar
from tests.unit.core.scheduler.harness import VOCAB, Harness

MOST = 4


def always_wrong(truth: list[int], count: int) -> list[int]:
    return [(token + 1) % VOCAB for token in truth[:count]]


def right_then_wrong(truth: list[int], count: int) -> list[int]:
    return [*truth[: count // 2], *always_wrong(truth[count // 2 :], count - count // 2)]


def unwritten(truth: list[int], count: int) -> list[int]:
    return [-1] * count


def beyond_the_vocabulary(truth: list[int], count: int) -> list[int]:
    return [truth[0], *[VOCAB + 5] * (count - 1)]


def nothing(truth: list[int], count: int) -> list[int]:
    return []


def like_a_coin(rng: np.random.Generator) -> Adversary:
    def draft(truth: list[int], count: int) -> list[int]:
        return [token if rng.random() < 0.7 else int(rng.integers(VOCAB)) for token in truth[: rng.integers(count + 1)]]

    return draft


ADVERSARIES = [always_right, always_wrong, right_then_wrong, unwritten, beyond_the_vocabulary, nothing]


def harness(adversary: Adversary, drafts: int = MOST, **options: object) -> Harness:
    kind = type("Speculating", (SpeculatingExecutor,), {"adversary": staticmethod(adversary)})
    return Harness(drafts=drafts, executor=kind, **options)  # type: ignore[arg-type]


def device(world: Harness) -> SpeculatingExecutor:
    assert isinstance(world.executor, SpeculatingExecutor)
    return world.executor


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda each: each.__name__)
def test_no_draft_changes_an_output(adversary: Adversary, page_size: int, depth: int) -> None:
    world = harness(adversary, pages=256 // page_size, page_size=page_size, depth=depth)
    reqs = [world.add(range(1 + i, 8 + 3 * i), max_tokens=1 + 7 * i) for i in range(6)]
    world.drain()
    for req in reqs:
        world.expect(req)


def test_right_drafts_are_as_many_tokens_less_steps() -> None:
    """40 outputs: the first with the prompt, then five at a time."""
    steps = {}
    for drafts in (0, MOST):
        world = harness(always_right, drafts, depth=1)
        req = world.add(range(1, 9), max_tokens=41)
        world.drain()
        world.expect(req)
        steps[drafts] = len(world.executor.batches)
    assert steps == {0: 41, MOST: 1 + 40 // (MOST + 1)}
    assert device(world).accepted == 32 and device(world).widest == MOST


@pytest.mark.parametrize("stop", range(1, 12))
def test_what_stands_behind_a_stop_token_is_dropped(stop: int) -> None:
    prompt = list(range(3, 9))
    truth = reference(prompt, 24, VOCAB)
    token = truth[stop]
    world = harness(always_right)
    beside = world.add(range(20, 30), max_tokens=24)
    req = world.add(prompt, max_tokens=24, stop_token_ids=(token,))
    world.drain()
    count = truth.index(token) + 1
    world.expect(req, count)
    assert world.seen[req].reason is FinishReason.STOP and len(req.outputs) == count
    world.expect(beside)


def test_a_stop_token_at_the_limit_counts_as_a_stop() -> None:
    prompt = list(range(3, 9))
    truth = reference(prompt, 24, VOCAB)
    place = next(i for i in range(6, 24) if truth.index(truth[i]) == i)
    world = harness(always_right)
    req = world.add(prompt, max_tokens=place + 1, stop_token_ids=(truth[place],))
    world.drain()
    world.expect(req, place + 1)
    assert world.seen[req].reason is FinishReason.STOP


@pytest.mark.parametrize(("page_size", "pages"), [(1, 28), (4, 8)])
def test_drafts_never_cost_a_request_its_place(page_size: int, pages: int) -> None:
    """A pool that just holds both requests until the first one ends: drafts go where there are no pages for them."""
    world = harness(always_wrong, pages=pages, page_size=page_size, cache="none", drafts=3)
    reqs = [world.add([i + 1] * 8, max_tokens=most) for i, most in enumerate((6, 20))]
    world.drain()
    for req in reqs:
        world.expect(req)
        assert req.retractions == 0
    assert device(world).proposed > 0


def test_rows_that_give_way_come_back_with_the_same_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = harness(like_a_coin(rng), rows=6, pages=20, page_size=4)
    reqs = [world.add(rng.integers(1, VOCAB, 8), max_tokens=24) for _ in range(8)]
    world.drain()
    for req in reqs:
        world.expect(req)
    assert any(req.retractions for req in reqs), "the pool was not short"


@pytest.mark.parametrize("adversary", [*ADVERSARIES, like_a_coin], ids=lambda each: each.__name__)
def test_requests_are_told_their_drafts_and_keep_them_where_they_give_way(adversary: Any, seed: int) -> None:
    """With a step at a time no result comes too late, so all requests together have what the device verified."""
    rng = np.random.default_rng(seed)
    says = adversary(rng) if adversary is like_a_coin else adversary
    world = harness(says, rows=6, pages=20, page_size=4, depth=1)
    reqs = [world.add(rng.integers(1, VOCAB, 8), max_tokens=24) for _ in range(8)]
    world.drain()
    assert any(req.retractions for req in reqs), "the pool was not short"
    assert sum(req.draft_tokens for req in reqs) == device(world).proposed
    assert sum(req.accepted_draft_tokens for req in reqs) == device(world).accepted
    assert all(req.accepted_draft_tokens <= min(req.draft_tokens, len(req.outputs)) for req in reqs)


def test_a_step_computes_no_more_than_its_budget() -> None:
    """16 tokens a step: 4 rows have room for 3 drafts each, and 16 rows for none."""
    world = harness(always_right, drafts=6, rows=16, pages=256)
    reqs = [world.add([i + 1, i + 2], max_tokens=40) for i in range(4)]
    world.drain()
    assert {int(batch.extend_lens.max()) for batch in world.executor.batches if batch.num_decode == 4} == {4}
    reqs += [world.add([i + 1, i + 2, 7], max_tokens=10 + i) for i in range(16)]
    world.drain()
    assert max(batch.num_tokens for batch in world.executor.batches if not batch.num_extend) <= 16
    full = [batch for batch in world.executor.batches if batch.num_decode == 16]
    assert full and not any(batch.verifies for batch in full)
    for req in reqs:
        world.expect(req)


def test_no_draft_is_verified_beside_a_prompt() -> None:
    world = harness(always_right)
    first = world.add(range(1, 9), max_tokens=60)
    for _ in range(4):
        world.step()
    second = world.add(range(1, 40), max_tokens=20)
    world.drain()
    mixed = [batch for batch in world.executor.batches if batch.num_extend and batch.num_decode]
    assert mixed and not any(batch.verifies for batch in mixed)
    world.expect(first)
    world.expect(second)


def test_ended_and_retracted_requests_leave_nothing_to_the_next_owner(seed: int) -> None:
    """Requests end at random while steps with drafts are in flight, and their rows are taken at once."""
    rng = np.random.default_rng(seed)
    world = harness(like_a_coin(rng), rows=3, pages=32, page_size=4)
    reqs: list[Req] = []
    for _ in range(60):
        if rng.random() < 0.4 and len(reqs) < 30:
            reqs.append(world.add(rng.integers(1, VOCAB, rng.integers(1, 20)), max_tokens=int(rng.integers(1, 30))))
        if reqs and rng.random() < 0.2:
            world.end(reqs[rng.integers(len(reqs))])
        world.step(run=bool(rng.random() < 0.8))
    world.drain()
    for req in reqs:
        seen = world.seen[req]
        assert seen.terminals == 1 and seen.tokens == reference(req.prompt.tolist(), len(seen.tokens), VOCAB)
        if seen.reason is FinishReason.LENGTH:
            assert len(seen.tokens) == req.max_new_tokens
    running = world.scheduler.running
    assert (running.planned >= running.planned_lower).all()


def test_bounds_meet_where_nothing_is_in_flight() -> None:
    world = harness(right_then_wrong, depth=2)
    req = world.add(range(1, 9), max_tokens=50)
    for _ in range(8):
        world.step()
    while world.executor.in_flight:
        world.executor.run_one()
        for result in world.executor.completed():
            world.scheduler._take(result, world.now)
    running, row = world.scheduler.running, req.row
    assert running.planned[row] == running.planned_lower[row] == running.known[row] - 1 == device(world).lens[row]


def test_drafts_are_decoded_and_not_filled_in() -> None:
    """Two prompts of 8 and 12 tokens are all that is filled in, however many drafts are verified."""
    world = harness(always_wrong)
    for length in (8, 12):
        world.add([length] * length, max_tokens=20)
    world.drain()
    computed = world.scheduler.stats.computed_tokens
    assert computed["prefill"] == 8 + 12
    assert computed["decode"] == sum(batch.num_tokens for batch in world.executor.batches) - (8 + 12)


def test_tokens_before_a_stop_share_all_of_their_step() -> None:
    """Gaps between tokens add up to the time from the first to the last, whatever was dropped behind the stop."""
    prompt = list(range(3, 9))
    truth = reference(prompt, 24, VOCAB)
    stop = next(i for i in range(6, 9) if truth.index(truth[i]) == i)
    world = harness(always_right, depth=1)
    req = world.add(prompt, max_tokens=24, stop_token_ids=(truth[stop],))
    world.drain()
    world.expect(req, stop + 1)
    histograms = world.scheduler.stats.histograms
    assert histograms["inter_token_latency_seconds"].counts[-1] == stop
    drafts = world.scheduler.stats.drafts
    assert drafts is not None and drafts.dropped == -stop % (MOST + 1), "the rest of the last step's five"
    gaps, decode = (histograms[f"{name}_seconds"].total for name in ("inter_token_latency", "request_decode_time"))
    assert gaps == pytest.approx(decode) and decode > 0


def test_no_draft_is_planned_behind_the_last_token() -> None:
    world = harness(always_right, depth=1)
    world.add(range(1, 9), max_tokens=8)
    world.drain()
    for batch in world.executor.batches:
        if batch.num_decode:
            assert batch.spec is not None
            assert (batch.spec.drafts < batch.spec.limits - batch.lower_lens).all()


def test_a_constrained_request_has_drafts_and_tells_its_text() -> None:
    world = harness(always_right, depth=1)
    req = world.add(range(1, 9), max_tokens=8)
    req.grammar = StepGrammar()
    beside = world.add(range(2, 9), max_tokens=8)
    world.drain()
    found = [batch for batch in world.executor.batches if batch.verifies]
    assert any(batch.spec is not None and batch.spec.drafts[batch.rows == 1].any() for batch in found)
    assert len([seed for batch in world.executor.batches if batch.spec for seed in batch.spec.seeds]) == 2
    world.expect(req)
    world.expect(beside)


def test_text_is_told_with_the_scope_of_its_request() -> None:
    world = harness(always_right)
    req = world.add(range(1, 9), max_tokens=4, salt="one")
    world.drain()
    (seed,) = (seed for batch in world.executor.batches if batch.spec for seed in batch.spec.seeds)
    assert seed.scope == req.salt != ""


def test_a_request_that_opts_out_has_no_drafts_and_tells_no_text() -> None:
    """Two rows, taken in turn by requests with and without: whatever was drafted for the owner before."""
    world = harness(always_right, rows=2, depth=2)
    reqs = [world.add(range(1 + i, 9 + i), max_tokens=9 + i, speculative=i % 3 == 0) for i in range(8)]
    world.drain()
    told = [seed for batch in world.executor.batches if batch.spec for seed in batch.spec.seeds]
    assert [seed.ids.tolist() for seed in told] == [req.prompt.tolist() for req in reqs if req.speculative]
    assert device(world).proposed > 0
    for req in reqs:
        world.expect(req)
    alone = harness(always_right, depth=1)
    alone.add(range(1, 9), max_tokens=9, speculative=False)
    alone.drain()
    assert not any(batch.verifies for batch in alone.executor.batches) and device(alone).proposed == 0


@pytest.mark.parametrize("first", range(6))
def test_the_first_end_in_a_step_counts(first: int) -> None:
    """A stop token among the outputs of one step, and the length, or another stop token, at its end."""
    prompt = list(range(3, 9))
    truth = reference(prompt, 24, VOCAB)
    world = harness(always_right, drafts=6, depth=1)
    stop, other = truth[1 + first], truth[2 + first]
    asked = [
        world.add(prompt, max_tokens=8, stop_token_ids=(stop,)),
        world.add(prompt, max_tokens=24, stop_token_ids=(stop, other)),
    ]
    world.drain()
    for req in asked:
        ends = [i for i in range(24) if truth[i] in req.params.stop_token_ids]
        world.expect(req, ends[0] + 1)
        assert world.seen[req].reason is FinishReason.STOP
        assert world.seen[req].matched_stop == truth[ends[0]]


def test_rows_that_stop_in_one_step_stop_each_at_its_own_place() -> None:
    world = harness(always_right, depth=1)
    asked = []
    for prompt in ([3, 4, 5], [9, 8, 7], [11, 2, 6]):
        truth = reference(prompt, 24, VOCAB)
        place = next(i for i in (2, 3) if truth.index(truth[i]) == i)
        asked.append((world.add(prompt, max_tokens=24, stop_token_ids=(truth[place],)), place + 1))
    world.drain()
    for req, count in asked:
        world.expect(req, count)
        assert len(req.outputs) == count


def test_tokens_of_a_step_share_the_time_since_the_step_before() -> None:
    """A step a second, and five tokens a step."""
    world = harness(always_right, depth=1)
    world.add(range(1, 9), max_tokens=11)
    world.drain()
    seen = world.scheduler.stats.histograms["inter_token_latency_seconds"]
    assert seen.counts[-1] == 10 and seen.total == pytest.approx(2.0)


def test_pages_are_not_taken_for_drafts_that_find_no_room() -> None:
    """Three requests that fit to their ends, as long as none holds pages for drafts that were not verified."""
    world = harness(always_wrong, depth=1, pages=16, page_size=2, cache="none", rows=4)
    prompts, most = ([1, 2, 3, 4, 5, 6, 7], [13, 14, 15, 16, 17], [25, 26, 27, 28, 29, 30]), (6, 15, 11)
    reqs = [world.add(prompt, max_tokens=count) for prompt, count in zip(prompts, most, strict=True)]
    world.drain()
    assert [req.retractions for req in reqs] == [0, 0, 0]


def test_drafts_in_flight_do_not_cost_a_request_its_place() -> None:
    """A row that would be short of a page only if its drafts prove right waits for the result."""
    world = harness(always_wrong, depth=2, pages=13, page_size=2, cache="none", rows=4)
    reqs = [world.add([1, 2, 3, 4, 5, 6, 7], max_tokens=14), world.add([13, 14, 15], max_tokens=7)]
    world.drain()
    assert [req.retractions for req in reqs] == [0, 0]
    for req in reqs:
        world.expect(req)
