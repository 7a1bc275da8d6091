"""The cost of a prompt before it is computed: its match in the radix tree, its insertion there, its admission."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from core.prefix.radix import RadixCache
from core.types.arrays import Ints
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from service.bench.scheduler_cost import PAGE_SIZE, new_scheduler

REPEATS = 15
VOCAB_IDS = 30_000


def match_seconds(pages: int, *, edges: int = 1) -> float:
    """Seconds to match, lock and unlock a prompt of `pages` pages, all of them cached, on a path of `edges` nodes."""
    cache, ids = RadixCache(PAGE_SIZE), prompt(pages)
    cache.insert(ids, np.arange(1, pages + 1), "", 0)
    # A match splits the edge in which it ends. From the last cut to the first, so that each match sees one edge only.
    for cut in range(edges - 1, 0, -1):
        cache.match(ids, pages * cut // edges * PAGE_SIZE, "")

    def work() -> None:
        node = cache.match(ids, ids.size, "").node
        cache.lock(node)
        cache.unlock(node)

    return _median(work)


def match_seconds_in_tree(nodes: int, pages: int = 64) -> float:
    """Seconds to match a prompt of `pages` pages in a tree of `nodes` prompts with as many pages each."""
    cache = RadixCache(PAGE_SIZE)
    for index in range(nodes):
        cache.insert(prompt(pages, index), np.arange(1, pages + 1) + index * pages, "", 0)
    ids = prompt(pages, nodes // 2)
    return _median(lambda: cache.match(ids, ids.size, ""))


def insert_seconds(pages: int) -> float:
    """Seconds to insert a prompt of `pages` pages into an empty tree; it is evicted again outside of the time."""
    cache, ids, numbers = RadixCache(PAGE_SIZE), prompt(pages), np.arange(1, pages + 1)
    return _median(lambda: cache.insert(ids, numbers, "", 0), after=cache.clear)


def admission_seconds(pages: int, *, cached: bool = False, running: int = 1) -> float:
    """Seconds of the step that admits a prompt of `pages` pages in one chunk: rows, pages, plan and batch.

    `cached`: all pages but the last are in the tree. `running`: number of requests that decode beside it.
    """
    tokens, limit = pages * PAGE_SIZE, 2 * REPEATS + 4 * running + 64
    scheduler = new_scheduler(running + 1, tokens + limit + PAGE_SIZE, policy="fcfs")
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for index in range(running):
        scheduler.intake.add(Req(f"r{index}", 0, np.full(8, index, np.int64), params, 0, limit))
    now, found = 0.0, []
    for _ in range(4):
        now += 0.005
        scheduler.step(now)
    for repeat in range(REPEATS):
        newcomer = Req("n", 0, prompt(pages, 0 if cached else repeat), params, 0, 1)
        scheduler.intake.add(newcomer)
        began = time.thread_time()
        scheduler.step(now)
        found.append(time.thread_time() - began)
        while newcomer.row or newcomer in scheduler.waiting:
            now += 0.005
            scheduler.step(now)
    # The first prompt is in no tree yet, `cached` or not.
    return statistics.median(found[1:])


def prompt(pages: int, seed: int = 0) -> Ints:
    """Random token ids, int64[pages * PAGE_SIZE], different for each seed."""
    return np.random.default_rng(seed).integers(3, VOCAB_IDS, pages * PAGE_SIZE)


def _median(work: Callable[[], object], after: Callable[[], object] | None = None) -> float:
    """Median seconds of `work` without its first run, in processor time of this thread. `after` is not timed."""
    found = []
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
        if after is not None:
            after()
    return statistics.median(found[1:])
