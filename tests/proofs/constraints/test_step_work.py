"""What a step pays for its constrained rows, counted: on which thread, before or behind the wait, and how often."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from core.batch.grammar_batch import GrammarSeed, GrammarStatus
from core.engine.async_engine import AsyncEngine
from core.executor import grammar_work
from core.executor.grammar_table import GrammarTable
from core.sampling.sampler import Sampler
from core.text.tokenizer import Tokenizer
from core.types.grammar import Grammar, Matcher, Words
from service.bench.emulated import TimelineEvent
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.constraints.test_endings import ask, plant
from tests.proofs.constraints.test_grammars import ALL, EOS, set_up
from tests.support.fakes.step_grammar import StepGrammar
from tests.unit.core.engine.emulation import HookedModel, running

NOTHING = np.empty(0, np.int64)


class Wait:
    """A `copy_done` that starts to count Python calls once it was waited for."""

    def __init__(self) -> None:
        self.calls = 0

    def synchronize(self) -> None:
        sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"


class Rows:
    """`count` rows of one grammar in a GrammarTable of their own, each of which takes its first allowed token."""

    def __init__(self, grammar: Grammar, count: int) -> None:
        self.rows = np.arange(1, count + 1)
        self.table = GrammarTable("results", None)
        self.step = 0
        seeds = tuple(GrammarSeed(row, 1, grammar, NOTHING) for row in self.rows.tolist())
        self.table.begin(self.batch(seeds))
        self.found = self.table.masks(self.batch())

    def batch(self, seeds: tuple[GrammarSeed, ...] = ()) -> Any:
        self.step += 1
        sampling = SimpleNamespace(constrained=np.arange(len(self.rows)), rows=self.rows)
        sampling = cast(Any, SizedNamespace(len(self.rows), **vars(sampling)))
        return SimpleNamespace(
            step_id=self.step,
            sampling=sampling,
            sample_rows=self.rows,
            sample_generations=np.ones(len(self.rows), np.int64),
            fresh_rows=NOTHING,
            grammar_seeds=seeds,
        )

    def go_on(self) -> int:
        """One step; the Python calls between the tokens and the masks."""
        wait = Wait()
        allowed = np.unpackbits(self.found.mask.words.view(np.uint8), axis=1, bitorder="little")
        host = SimpleNamespace(tokens=torch.from_numpy(allowed.argmax(axis=1)))
        self.table.sampled(self.batch(), cast(Any, host), cast(Any, wait))
        try:
            self.found = self.table.masks(self.batch())
        finally:
            sys.setprofile(None)
        assert (self.found.status == GrammarStatus.OPEN).all()
        return wait.calls


class SizedNamespace(SimpleNamespace):
    """As long as it says."""

    def __init__(self, size: int, **fields: Any) -> None:
        super().__init__(**fields)
        self._size = size

    def __len__(self) -> int:
        return self._size


@pytest.mark.parametrize("name", BACKENDS)
def test_python_calls_behind_the_wait_are_few_per_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is slow on a busy machine goes another way, with more calls.
    monkeypatch.setattr(grammar_work, "SUSPICIOUS_SECONDS", 1e9)
    if name == "llguidance":
        pool_module = pytest.importorskip("core.sampling.grammar.mask_pool")
        monkeypatch.setattr(pool_module, "SLOW_SECONDS", 1e9)
        monkeypatch.setattr(pool_module, "BUDGET_SECONDS", 1e9)
    grammar = set_up(name, EOS)[0].compile(ALL[0])
    few, many = Rows(grammar, 4), Rows(grammar, 36)
    for _ in range(3):
        calls = few.go_on(), many.go_on()
    print(f"{name}: {calls[0]} calls for 4 rows, {calls[1]} for 36")
    # The clock behind each call of llguidance; what xgrammar's own wrapper makes of a list, and `took`.
    per_row = 2 if name == "llguidance" else 8
    # Nor do the calls for every few rows add up: three in which they accept, three for their masks, instead of one.
    assert calls[1] - calls[0] <= per_row * 32 + 40


def test_llguidance_works_where_it_is_while_that_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    pool_module = pytest.importorskip("core.sampling.grammar.mask_pool", reason="llguidance is not installed")
    backend, _ = set_up("llguidance", EOS)
    pool = cast(Any, backend).pool
    monkeypatch.setattr(pool_module, "SLOW_SECONDS", 1e9)
    monkeypatch.setattr(grammar_work, "SUSPICIOUS_SECONDS", 1e9)
    masks = []
    for budget, wanted in ((1e9, [1, 0, 0]), (0.0, [1, 2, 2])):
        monkeypatch.setattr(pool_module, "BUDGET_SECONDS", budget)
        before = pool.handed_over
        rows = Rows(backend.compile(ALL[0]), grammar_work.TOGETHER)
        counts = [pool.handed_over - before]
        masks.append([rows.found.mask.words.copy()])
        for _ in range(2):
            before = pool.handed_over
            rows.go_on()
            counts.append(pool.handed_over - before)
            masks[-1].append(rows.found.mask.words.copy())
        assert counts == wanted, "the first mask of a grammar and what is beyond the budget go to the threads at once"
    assert all(np.array_equal(here, there) for here, there in zip(*masks, strict=True))


def test_a_slow_row_sends_its_grammar_to_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pool_module = pytest.importorskip("core.sampling.grammar.mask_pool", reason="llguidance is not installed")
    backend, _ = set_up("llguidance", EOS)
    monkeypatch.setattr(pool_module, "SLOW_SECONDS", 1e9)
    monkeypatch.setattr(pool_module, "BUDGET_SECONDS", 1e9)
    monkeypatch.setattr(grammar_work, "SUSPICIOUS_SECONDS", 1e9)
    rows = Rows(backend.compile(ALL[0]), 3)
    rows.go_on()
    monkeypatch.setattr(pool_module, "SLOW_SECONDS", 0.0)
    before = cast(Any, backend).pool.handed_over
    rows.go_on()
    # Behind the first token, which was slow here: the other tokens, then all masks.
    assert cast(Any, backend).pool.handed_over == before + 2


class Counting(StepGrammar):
    """Counts what it is asked, by thread."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, str]] = Counter()

    def _note(self, what: str) -> None:
        self.asked[what, threading.current_thread().name] += 1

    def accept_all(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        self._note("accept")
        return super().accept_all(matchers, tokens)

    def fill_all(self, matchers: Sequence[Matcher], words: Words) -> npt.NDArray[np.bool_]:
        self._note("fill")
        return super().fill_all(matchers, words)


async def test_one_call_a_step_on_the_forward_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that stands still for a moment makes a call look slow, and then its rows are asked one by one.
    monkeypatch.setattr(grammar_work, "SUSPICIOUS_SECONDS", 60.0)

    async def together(engine: AsyncEngine, count: int) -> tuple[Counter[tuple[str, str]], int]:
        grammar = Counting()
        constraint = plant(engine, grammar, f"counted {count}")
        before = model.step
        await asyncio.gather(*(ask(engine, constraint, 20) for _ in range(count)))
        return grammar.asked, model.step - before

    model = HookedModel(tokenizer)
    async with running(tokenizer, model) as engine:
        for count in (1, 8):
            asked, steps = await together(engine, count)
            assert {thread for _, thread in asked} == {"slipstream-forward"}
            assert 20 <= asked["fill", "slipstream-forward"] <= steps
            assert 19 <= asked["accept", "slipstream-forward"] <= steps


async def test_what_needs_no_mask_is_launched_before_the_wait(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def noting(self: Any, *args: Any) -> Any:
            if threading.current_thread().name == "slipstream-forward":
                done.append(name)
            return inner(self, *args)

        monkeypatch.setattr(owner, name, noting)

    noted(HookedModel, "forward")
    noted(Sampler, "score_on")
    noted(TimelineEvent, "synchronize")
    noted(Sampler, "pick")
    async with running(tokenizer) as engine:
        await ask(engine, plant(engine, StepGrammar(), "ordered"), 8)
    steps = "|".join(done).split("forward|")[2:]
    assert len(steps) >= 6 and all(step.startswith("score_on|synchronize|pick|") for step in steps[:6])
