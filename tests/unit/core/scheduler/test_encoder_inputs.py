"""Encoder inputs in the plans: what a step may cost, who waits for cross pages, and whose input a token came from.

The device is the hash executor, whose every token here also depends on all that stands in the row's cross pages.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.batch.result import StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.config import SchedulerConfig
from core.memory.cross.cross_pages import CROSS, CrossPages, CrossWrites
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.prefix.registry import build_prefix_cache
from core.scheduler.scheduler import Scheduler
from core.types.io import FinishReason
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.support.fakes.hash_executor import UNWRITTEN, HashExecutor, content, next_token, pin
from tests.unit.core.scheduler.harness import EOS, VOCAB, Harness, Seen

START = 1
PAGE = 4
LONGEST = 40
BUDGET = 16


class CrossExecutor(HashExecutor):
    """Keeps the id of each encoder token at its cross slot, and says what `output` says of them."""

    def __init__(self, num_rows: int, num_slots: int, cross_slots: int, depth: int) -> None:
        super().__init__(num_rows, 64, num_slots, VOCAB, depth)
        self.cross_table = np.zeros((num_rows, LONGEST), np.int64)
        self.cross = np.full(cross_slots, UNWRITTEN, np.int64)
        self.lengths = np.zeros(num_rows, np.int64)

    def _execute(self, batch: ScheduleBatch) -> StepResult:
        writes: CrossWrites = batch.companion_writes[CROSS]
        staged = batch.staging.encoder_ids_cpu
        ids = np.empty(0, np.int64) if staged is None else staged.numpy()
        assert len(ids) == batch.encoder_lens.sum() == len(writes.slots)
        self.cross_table[writes.rows, writes.places] = writes.slots
        self.cross[writes.slots] = ids
        self.lengths[batch.rows[writes.batch_places]] = writes.last_places + 1
        return super()._execute(batch)

    def _sample(self, batch: ScheduleBatch, i: int) -> int:
        row, length = int(batch.rows[i]), int(batch.seq_lens[i])
        decoder = self.kv[self.table[row, :length]]
        encoder = self.cross[self.cross_table[row, : self.lengths[row]]]
        assert (decoder != UNWRITTEN).all() and (encoder != UNWRITTEN).all()
        return next_token([*encoder.tolist(), -7, *decoder.tolist()], 0, VOCAB)


def output(encoder_ids: list[int], count: int) -> list[int]:
    """What a correct engine generates: no pools, no batches, no overlap."""
    ids = [START]
    for _ in range(count):
        ids.append(next_token([*encoder_ids, -7, *(content(t, p) for p, t in enumerate(ids))], 0, VOCAB))
    return ids[1:]


class EncoderHarness(Harness):
    """A scheduler over decoder pages and cross pages."""

    def __init__(
        self, *, rows: int = 8, pages: int = 64, cross_pages: int = 64, depth: int = 2, **config: object
    ) -> None:
        self.cross = CrossPages(cross_pages, PAGE, rows + 1)
        cache = build_prefix_cache("none", PAGE)
        self.memory = RequestMemory(RowAllocator(rows), PagedKVAllocator(pages, PAGE), cache, 64, [self.cross])
        self.executor = CrossExecutor(rows + 1, (pages + 1) * PAGE, (cross_pages + 1) * PAGE, depth)
        self.scheduler = Scheduler(
            SchedulerConfig(chunked_prefill_size=BUDGET, **config),  # type: ignore[arg-type]
            self.memory,
            self.executor,
            self._emit,
            max_len=64,
            vocab_size=VOCAB,
            eos_ids=(EOS,),
            pin=pin,
        )
        self.seen: dict[Req, Seen] = {}
        self.now = 0.0

    def ask(self, encoder_ids: list[int], max_tokens: int = 8) -> Req:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        ids = np.array(encoder_ids, np.int64)
        req = Req("r", 0, np.array([START]), params, 0, max_tokens, encoder_ids=ids, arrived_at=self.now)
        self.seen[req] = Seen()
        self.scheduler.intake.add(req)
        return req

    def drain(self, limit: int = 3000) -> int:
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < limit, "no end in sight: livelock"
        assert all(pool.used == pool.cached == 0 for pool in self.memory.stats())
        return steps

    def told(self, req: Req, count: int | None = None) -> bool:
        """Whether the client saw the first `count` tokens of the right output, or all of it, and one terminal."""
        assert req.encoder_ids is not None
        count = req.max_new_tokens if count is None else count
        return self.seen[req].terminals == 1 and self.seen[req].tokens == output(req.encoder_ids.tolist(), count)


def inputs(count: int, seed: int, longest: int = LONGEST) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mixed_chunk", [True, False])
def test_every_request_hears_its_own_input(depth: int, mixed_chunk: bool) -> None:
    """More requests than rows, than cross pages, and than the decoder's pages hold to their ends."""
    harness = EncoderHarness(depth=depth, mixed_chunk=mixed_chunk, pages=10, cross_pages=40)
    reqs = [harness.ask(ids, 1 + i % 24) for i, ids in enumerate(inputs(40, seed=1))]
    harness.drain()
    assert harness.scheduler.stats.preemptions > 0
    assert all(harness.told(req) for req in reqs)


def test_ends_at_any_time_free_both_pools(seed: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    harness = EncoderHarness(pages=10, cross_pages=40)
    reqs = [harness.ask(ids, 20) for ids in inputs(30, seed)]
    doomed = draw.sample(reqs, 15)
    for req in doomed:
        for _ in range(draw.randrange(6)):
            harness.step(run=draw.random() < 0.7)
        harness.end(req)
    harness.drain()
    for req in reqs:
        assert harness.told(req, len(harness.seen[req].tokens) if req in doomed else None)


def test_inputs_share_the_budget_with_chunks_and_one_that_is_longer_goes_alone() -> None:
    harness = EncoderHarness(depth=1)
    for length in (5, 6, 7, 30, 16, 15, 3, 1):
        harness.ask([length] * length, 2)
    harness.drain()
    encoded = [batch.encoder_lens.tolist() for batch in harness.executor.batches if len(batch.encoder_lens)]
    assert encoded == [[5, 6], [7], [30], [16], [15], [3, 1]]
    for batch in harness.executor.batches:
        chunks = int(batch.extend_lens[: batch.num_extend].sum())
        assert batch.encoder_lens.sum() + chunks <= BUDGET or batch.num_extend == 1


def test_who_comes_back_is_encoded_again_with_its_first_chunk_only() -> None:
    harness = EncoderHarness(rows=2, pages=11, depth=1)
    reqs = [harness.ask([7] * 10, 30), harness.ask([8] * 10, 30)]
    harness.drain()
    assert harness.scheduler.stats.preemptions == reqs[1].retractions == 1
    (again,) = [b for b in harness.executor.batches if b.num_extend and b.prefix_lens[0] == 0][2:]
    rest = [b for b in harness.executor.batches if b.num_extend and b.prefix_lens[0] > 0]
    assert again.encoder_lens.tolist() == [10] and again.extend_lens[0] == BUDGET - 10
    assert rest and all(len(batch.encoder_lens) == 0 for batch in rest)
    assert all(harness.told(req) for req in reqs)


def test_a_full_pool_of_cross_pages_makes_wait_and_retracts_nobody() -> None:
    harness = EncoderHarness(cross_pages=10, depth=1)
    reqs = [harness.ask([n] * 20, 6) for n in range(5)]
    most = 0
    while harness.scheduler.has_work:
        harness.step()
        most = max(most, len(harness.scheduler.running))
    assert most == 2 and harness.scheduler.stats.preemptions == 0
    assert all(harness.told(req) and harness.seen[req].reason is FinishReason.LENGTH for req in reqs)
