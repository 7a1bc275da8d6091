"""Exponents of what the loop costs: of steady decode in running and waiting requests, of admission in prompt pages.

Counted, never timed, so a busy machine changes nothing: see `counting`.
"""

from __future__ import annotations

import numpy as np
import pytest

from core.prefix.radix import RadixCache
from core.scheduler.policy import POLICIES
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from service.bench.admission_cost import prompt
from service.bench.loop_step import LoopStep
from service.bench.scheduler_cost import PAGE_SIZE, new_scheduler
from tests.unit.core.scheduler.counting import Work, growth, opcodes, peak_bytes

SIZES = (64, 128, 256, 512)
FLAT, LINEAR = 0.05, 1.05
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


def decode_step(running: int) -> Work:
    """The scheduler's own part of a step in which everybody decodes."""
    scheduler = LoopStep(running, 32, read=False).scheduler
    scheduler._emit = lambda outputs, now: None
    return lambda: scheduler.step(1.0)


def whole_step(running: int) -> Work:
    """The same with streams, and readers that take every token."""
    return LoopStep(running, 32).step


def stopping_step(running: int) -> Work:
    """As `decode_step`, and everybody has stop tokens that do not come."""
    scheduler = new_scheduler(running, 128)
    params = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(2000, 2002))
    for index in range(running):
        scheduler.intake.add(Req(str(index), 0, np.full(8, index), params, 0, 100))
    for _ in range(4):
        scheduler.step(0.0)
    return lambda: scheduler.step(1.0)


@pytest.mark.parametrize("make", [decode_step, stopping_step], ids=lambda make: make.__name__)
def test_the_scheduler_runs_no_python_per_running_request(make) -> None:  # type: ignore[no-untyped-def]
    assert growth(opcodes, make, SIZES) < FLAT


def test_a_whole_step_is_linear_in_running_requests() -> None:
    assert growth(opcodes, whole_step, SIZES) < LINEAR
    assert growth(peak_bytes, whole_step, SIZES) < LINEAR


@pytest.mark.parametrize("policy", POLICIES)
def test_who_waits_costs_a_step_nothing(policy: str) -> None:
    """Neither when no row is free, nor when one is and somebody is admitted."""

    def crowded(waiting: int) -> Work:
        scheduler = new_scheduler(2, 4 * PAGE_SIZE, policy=policy)
        for index in range(waiting):
            scheduler.intake.add(Req(str(index), 0, np.full(20, index), PARAMS, 0, 9))
        scheduler.step(0.0)

        def turns() -> None:
            for _ in range(40):
                scheduler.step(1.0)

        return turns

    assert growth(opcodes, crowded, [4 * size for size in SIZES]) < FLAT


def admission(pages: int) -> Work:
    """The step that admits a prompt beside two requests that decode."""
    scheduler = new_scheduler(3, 1024 * PAGE_SIZE)
    for index in range(2):
        scheduler.intake.add(Req(str(index), 0, np.full(8, index), PARAMS, 0, 64))
    for _ in range(4):
        scheduler.step(0.0)
    scheduler.intake.add(Req("n", 0, prompt(pages), PARAMS, 0, 8))
    return lambda: scheduler.step(1.0)


def test_admission_is_linear_in_prompt_pages() -> None:
    """Arrays grow with the pages, and no bytecode is run for each."""
    assert growth(opcodes, admission, SIZES) < FLAT
    assert growth(peak_bytes, admission, SIZES) < LINEAR


def test_admission_does_not_depend_on_who_runs() -> None:
    def joining(running: int) -> Work:
        step = LoopStep(running, 32, read=False, spare=1)
        step.scheduler._emit = lambda outputs, now: None
        step.scheduler.intake.add(Req("n", 0, prompt(4), PARAMS, 0, 8))
        return lambda: step.scheduler.step(1.0)

    assert growth(opcodes, joining, SIZES) < FLAT


def test_a_step_does_not_depend_on_the_context() -> None:
    """A row is as wide as the context, and whoever copies rows copies what nobody has written."""

    def within(context: int) -> Work:
        scheduler = new_scheduler(16, context)
        for index in range(16):
            scheduler.intake.add(Req(str(index), 0, np.full(8, index), PARAMS, 0, 64))
        for _ in range(4):
            scheduler.step(0.0)
        return lambda: scheduler.step(1.0)

    assert growth(peak_bytes, within, [64 * size for size in SIZES]) < FLAT


def held(pages: int, edges: int) -> tuple[RadixCache, np.ndarray]:
    """A tree that holds a prompt of `pages` pages on a path of `edges` nodes."""
    cache, ids = RadixCache(PAGE_SIZE), prompt(pages)
    for end in np.linspace(pages / edges, pages, edges).astype(np.int64).tolist():
        cache.insert(ids, np.arange(1, end + 1), "", cache.peek(ids, end * PAGE_SIZE, ""))
    return cache, ids


def matching_one_edge(pages: int) -> Work:
    cache, ids = held(pages, 1)
    return lambda: cache.match(ids, ids.size, "")


def matching_an_edge_per_page(pages: int) -> Work:
    cache, ids = held(pages, pages)
    return lambda: cache.lock(cache.match(ids, ids.size, "").node)


def inserting(pages: int) -> Work:
    cache, ids = RadixCache(PAGE_SIZE), prompt(pages)
    return lambda: cache.insert(ids, np.arange(1, pages + 1), "", 0)


@pytest.mark.parametrize("make", [matching_one_edge, inserting], ids=lambda make: make.__name__)
def test_pages_of_one_edge_cost_no_python_each(make) -> None:  # type: ignore[no-untyped-def]
    assert growth(opcodes, make, SIZES) < FLAT
    assert growth(peak_bytes, make, SIZES) < LINEAR


def test_a_match_is_linear_in_prompt_pages_however_the_tree_is_cut() -> None:
    assert growth(opcodes, matching_an_edge_per_page, SIZES) < LINEAR
    assert growth(peak_bytes, matching_an_edge_per_page, SIZES) < LINEAR


def test_a_match_does_not_depend_on_the_tree() -> None:
    def matching(prompts: int) -> Work:
        cache = RadixCache(PAGE_SIZE)
        for index in range(prompts):
            cache.insert(prompt(4, index), np.arange(1, 5) + 4 * index, "", 0)
        ids = prompt(4, prompts // 2)
        return lambda: cache.match(ids, ids.size, "")

    assert growth(opcodes, matching, SIZES) < FLAT


def test_steady_decode_makes_one_object_a_request_and_leaves_none() -> None:
    """Between the results and the hand-over: the token itself, as an integer of Python's. A page's bytes are no object,
    and what a step needs once (arrays, the batch) is little beside 512 requests.
    """
    alive, stays = LoopStep(512, 96).churn(48)
    print(f"{alive:.3f} objects a request at the hand-over, {stays:.3f} left by a step")
    assert alive < 1.25
    assert stays < 0.05
