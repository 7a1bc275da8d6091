"""The production scheduler over a window pool of few windows: all end with their tokens, no step lacks a page."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.batch.result import StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import NAME, WindowPages
from tests.support.fakes.hash_executor import UNWRITTEN, HashExecutor
from tests.support.nightly import runs
from tests.unit.core.scheduler.harness import Harness

PAGE, WINDOW, CHUNK, ROWS, PAGES = 4, 11, 16, 8, 96
BOUNDS = WindowBounds(WINDOW, PAGE, CHUNK)


class WindowExecutor(HashExecutor):
    """Keeps what the ordinary pool holds in a window pool as well, and compares all that a query sees in both."""

    def __init__(self, num_rows: int, max_len: int, num_slots: int, vocab_size: int, depth: int) -> None:
        super().__init__(num_rows, max_len, num_slots, vocab_size, depth)
        self.translation = np.zeros(num_slots // PAGE, np.int64)
        self.windows = np.full(num_slots, UNWRITTEN, np.int64)
        self.looked_at = 0

    def _execute(self, batch: ScheduleBatch) -> StepResult:
        writes = batch.companion_writes.get(NAME)
        if writes is not None:
            self.translation[writes.pages] = writes.windows
        result = super()._execute(batch)
        for row, prefix, end in zip(batch.rows, batch.prefix_lens, batch.seq_lens, strict=True):
            slots = self.table[row, prefix:end]
            self.windows[self._translated(slots)] = self.kv[slots]
        for row, prefix, end in zip(batch.rows, batch.prefix_lens, batch.seq_lens, strict=True):
            slots = self.table[row, max(0, prefix - WINDOW + 1) : end]
            assert (self.windows[self._translated(slots)] == self.kv[slots]).all(), (batch.step_id, row)
            self.looked_at += len(slots)
        return result

    def _translated(self, slots: np.ndarray) -> np.ndarray:
        pages = self.translation[slots // PAGE]
        assert (pages > 0).all(), "a page inside a window is not there"
        translated: np.ndarray = pages * PAGE + slots % PAGE
        return translated


def make(size: int, **options: object) -> tuple[WindowPages, Harness]:
    windows = WindowPages(size, PAGES, ROWS + 1, BOUNDS)
    options = {"rows": ROWS, "pages": PAGES, "page_size": PAGE, "chunked_prefill_size": CHUNK, **options}
    return windows, Harness(companions=[windows], executor=WindowExecutor, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "separate"])
def test_random_requests_end_with_their_own_tokens(cache: str, mixed: bool, seed: int) -> None:
    for case in range(runs(3, 6)):
        rng = random.Random(seed * 1000 + case)
        size = BOUNDS.alone + rng.randrange(12)
        windows, house = make(size, cache=cache, mixed_chunk=mixed, depth=rng.choice([1, 2]))
        hot = [rng.randrange(60) for _ in range(40)]
        reqs = [house.add([rng.randrange(60)], 49) for _ in range(ROWS)]
        for _ in range(25):
            tail = [rng.randrange(60) for _ in range(rng.randrange(1, 20))]
            prompt = hot[: rng.choice([0, 0, 8, 24, 40])] + tail
            reqs.append(house.add(prompt, rng.randrange(1, 50)))
            for _ in range(rng.randrange(8)):
                house.step(run=rng.random() < 0.8)
                assert windows.stats()[0].used <= size
        house.drain(6000)
        for last in range(2):
            reqs.append(house.add([*hot, last], 2))
            house.drain()
        for req in reqs:
            house.expect(req)
        assert house.executor.looked_at > 1000  # type: ignore[attr-defined]
        assert any(req.retractions for req in reqs), "what the first requests grow to was meant to be too much"
        assert reqs[-1].cached_tokens == (len(hot) if cache == "radix" else 0)


def test_a_common_system_prompt_is_found_far_behind_those_who_computed_it() -> None:
    """Eight windows long, and everybody has passed it when the last one comes."""
    _, house = make(64, cache="radix")
    system = [(7 * place) % 60 for place in range(8 * WINDOW)]
    early = [house.add([*system, 60 + n], 20) for n in range(3)]
    house.drain()
    late = house.add([*system, 5, 6, 7], 20)
    house.drain()
    assert late.cached_tokens == len(system) // PAGE * PAGE
    for req in (*early, late):
        house.expect(req)
