"""Which prompt tokens a step tells of: how many, each once, of whom, and what is planned around them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from core.batch.build import Segment, joined
from core.batch.result import LogprobResult, ScoredPrompts, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.scheduler import prefill_adder
from core.scheduler.outputs import StepOutputs
from core.types.request import Req
from tests.support.fakes.hash_executor import HashExecutor
from tests.unit.core.scheduler.harness import VOCAB, Harness

MOST = 5


class ScoringExecutor(HashExecutor):
    """Its log probabilities say which token they are of, by id and place."""

    def _execute(self, batch: ScheduleBatch) -> StepResult:
        result, scoring = super()._execute(batch), batch.scoring
        if scoring is None:
            return result
        values = scoring.targets.astype(np.float32)
        none = np.empty((len(values), 0))
        found = LogprobResult(values, none.astype(np.int64), none.astype(np.float32))
        return dataclasses.replace(result, scored=ScoredPrompts(scoring, found))


class Told(Harness):
    """Keeps what was told of prompts, as (place below 0, token, log probability)."""

    def __init__(self, **settings: object) -> None:
        self.told: dict[Req, list[tuple[int, int, float]]] = {}
        self.finished: list[Req] = []
        super().__init__(executor=ScoringExecutor, **settings)  # type: ignore[arg-type]

    def _emit(self, outputs: StepOutputs, now: float) -> None:
        for step in outputs.tokens:
            if step.of_prompts:
                assert step.logprobs is not None
                values = step.logprobs.values[step.logprob_rows].tolist()
                for req, *entry in zip(step.reqs, step.positions.tolist(), step.tokens, values, strict=True):
                    assert not self.seen[req].tokens, "before all tokens of the output"
                    self.told.setdefault(req, []).append((entry[0], entry[1], entry[2]))
        self.finished += [ended.req for ended in outputs.ended]
        super()._emit(StepOutputs(tuple(each for each in outputs.tokens if not each.of_prompts), outputs.ended), now)

    def expect_told(self, req: Req) -> None:
        length = req.prompt_len
        ids = req.prompt.tolist()
        assert self.told.get(req, []) == [(place - length, ids[place], float(ids[place])) for place in range(1, length)]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_adder, "SCORED_BYTES", 0)
    monkeypatch.setattr(prefill_adder, "LEAST_SCORED", MOST)


def scored(batch: ScheduleBatch) -> int:
    return 0 if batch.scoring is None else len(batch.scoring.places)


def test_each_token_is_told_once_and_few_in_a_step() -> None:
    world = Told(chunked_prefill_size=64)
    told = [
        world.add([i, *range(1, length)], prompt_logprobs=0, max_tokens=1) for i, length in enumerate((23, 2, 1, 9))
    ]
    plain = world.add(range(30, 60), max_tokens=4)
    world.drain()
    for req in told:
        world.expect(req)
        world.expect_told(req)
    world.expect(plain)
    assert plain not in world.told
    sizes = [scored(batch) for batch in world.executor.batches]
    assert max(sizes) <= MOST and sum(sizes) == 22 + 1 + 8
    whole = [batch for batch in world.executor.batches if 30 in batch.extend_lens]
    assert len(whole) == 1, "other prompts are cut as ever"


def test_a_long_one_holds_up_no_prompt_behind_it() -> None:
    world = Told(chunked_prefill_size=64)
    long = world.add(range(60), prompt_logprobs=0, max_tokens=1)
    world.step()
    short = world.add([3, 4, 5], max_tokens=2)
    other = world.add([6, 7, 8], prompt_logprobs=0, max_tokens=2)
    for _ in range(6):
        world.step()
    world.expect(short)
    assert not world.seen[long].terminals and not world.told.get(other)
    world.drain()
    for req in (long, other):
        world.expect(req)
        world.expect_told(req)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_others_pass_by_those_that_wait_to_be_told(policy: str) -> None:
    """However many of them wait in front; and they keep their order."""
    world = Told(chunked_prefill_size=64, policy=policy)
    long = [world.add([i, *range(60)], prompt_logprobs=0, max_tokens=1) for i in range(12)]
    short = [world.add([70 + i, 4, 5], max_tokens=1) for i in range(3)]
    for _ in range(6):
        world.step()
    for req in short:
        world.expect(req)
    assert not any(world.seen[req].terminals for req in long)
    world.drain()
    for req in long:
        world.expect(req)
        world.expect_told(req)
    assert list(world.told) == long


def test_one_that_is_to_be_told_keeps_its_place() -> None:
    """Among requests that come and go, where there is one row."""
    world = Told(chunked_prefill_size=64, rows=1)
    reqs = [world.add([i, 1, 2], prompt_logprobs=0 if i % 2 else None, max_tokens=1) for i in range(8)]
    world.drain()
    assert world.finished == reqs


@pytest.mark.parametrize("tokens", [1, 7, 19])
def test_the_bound_is_on_the_bytes_of_their_logits(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_adder, "SCORED_BYTES", tokens * VOCAB * 4 + 3)
    monkeypatch.setattr(prefill_adder, "LEAST_SCORED", 1)
    world = Told(chunked_prefill_size=64)
    reqs = [world.add([i, *range(20)], prompt_logprobs=0, max_tokens=1) for i in range(2)]
    world.drain()
    assert max(scored(batch) for batch in world.executor.batches) == tokens
    for req in reqs:
        world.expect_told(req)


def test_places_are_those_before_the_tokens() -> None:
    world = Told(chunked_prefill_size=64)
    world.add(range(40, 60), max_tokens=3)
    world.step()
    req = world.add(range(7), prompt_logprobs=2, max_tokens=2)
    world.drain()
    world.expect_told(req)
    for batch in world.executor.batches:
        if (scoring := batch.scoring) is not None:
            assert scoring.top == 2
            staged = batch.staging.prefill_ids_cpu
            assert staged is not None and (staged.numpy()[scoring.places] == scoring.targets - 1).all()
            wanted = scoring.beside(np.array([len(staged)]))
            assert (np.diff(wanted) > 0).all() and len(wanted) == len(scoring.places) + 1


def test_a_prompt_that_gives_way_in_its_middle_goes_on_where_it_was_told() -> None:
    world = Told(rows=1, policy="priority", chunked_prefill_size=64)
    low = world.add(range(30), prompt_logprobs=0, priority=5, max_tokens=2)
    for _ in range(4):
        world.step()
    before = len(world.told[low])
    assert 0 < before < 29
    high = world.add([50, 51], priority=-5, max_tokens=2)
    world.drain()
    assert low.retractions == 1
    world.expect(high)
    world.expect(low)
    world.expect_told(low)


def test_a_prompt_that_was_told_takes_its_prefix_from_the_cache() -> None:
    """After a retraction too; before it takes none, and gives it to others."""
    world = Told(rows=2)
    first = world.add(range(20), max_tokens=2)
    world.drain()
    req = world.add(range(20), prompt_logprobs=0, max_tokens=2)
    world.drain()
    after = world.add(range(20), max_tokens=2)
    world.drain()
    assert (first.cached_tokens, req.cached_tokens) == (0, 0) and after.cached_tokens > 0
    world.expect_told(req)
    assert not req.scores and req.reuses_prefix


def test_of_outputs_that_share_a_prompt_the_first_tells_it() -> None:
    world = Told()
    req = world.add(range(9), prompt_logprobs=0)
    assert req.scores
    req.index = 1
    assert not req.scores
    world.drain()
    assert req not in world.told


def test_an_owner_that_is_gone_is_told_nothing() -> None:
    world = Told(chunked_prefill_size=64)
    req = world.add(range(30), prompt_logprobs=0)
    world.step()
    world.end(req)
    world.drain()
    assert world.seen[req].terminals == 1 and len(world.told.get(req, [])) < 29


def test_chunks_of_a_row_in_one_step_are_told_together() -> None:
    ids = np.arange(10)
    first = Segment(1, 0, ids[:4], False, targets=ids[1:5], top=2)
    last = Segment(1, 4, ids[4:], True, targets=ids[5:], top=2)
    other = Segment(2, 0, ids[:3], False)
    (one, two) = joined([first, other, last])
    assert one.targets is not None and one.targets.tolist() == list(range(1, 10)) and one.top == 2 and one.final
    assert two.targets is None
    short = Segment(1, 4, ids[4:5], True)
    assert joined([first, short])[0].targets is not None, "the last token of a prompt has none behind it"
