"""The production scheduler and step over lazy streams: every kind of step, no race, and the tokens of a plain run.

The plain run neither overlaps nor delays anything. Each seed delays other work, interleaves the threads in another
order, and runs the streams against each other in another order that their events allow. One seed is the run's own, so
every run of the suite looks at something new.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.memory.host_tier import BLOCK
from core.models.loader import load_model
from tests.proofs.happens_before.harness import VOCAB, Ask, Outcome, Scenario, play_lazily, play_plainly
from tests.proofs.happens_before.hash_model import expected_tokens
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes.step_grammar import StepGrammar, follows

SEEDS = range(2)
SHARED = [11, 12, 13, 14, 15, 16, 17, 18, 19]


def prompt(length: int, number: int = 0) -> list[int]:
    rng = random.Random(length * 100 + number)
    return [rng.randrange(VOCAB) for _ in range(length)]


def over_host_memory(prompts: Sequence[int], *, gap: int, tokens: int, rows: int, blocks: int = 7) -> Scenario:
    """Prompts of three chunks of which the pages hold two or three, and host memory not all: blocks change hands."""
    asks = [Ask(prompt(11, i), tokens=tokens + turn % 3, at=gap * turn) for turn, i in enumerate(prompts)]
    return Scenario(asks, rows=rows, pages=7, host_bytes=blocks * BLOCK, host_chunk=4)


DICE = {"temperature": 1.0, "top_k": 3, "logprobs": True, "top_logprobs": 2}
PENALTIES = {"frequency_penalty": 2.0, "repetition_penalty": 1.5}

GRAMMAR = StepGrammar()

SCENARIOS = {
    "prefill": Scenario([Ask(prompt(n), tokens=1) for n in (3, 9, 14)]),
    "decode": Scenario([Ask(prompt(n), tokens=9) for n in (3, 5)]),
    "middle chunks": Scenario([Ask(prompt(30), tokens=3), Ask(prompt(21), tokens=3)], chunk=8),
    "mixed": Scenario([Ask(prompt(5 + i), tokens=6, at=2 * i) for i in range(4)], chunk=8),
    "retraction": Scenario([Ask(prompt(9, i), tokens=16) for i in range(3)], pages=11, cache="none"),
    "rejoin": Scenario([Ask(prompt(9, i), tokens=10) for i in range(3)], pages=9, cache="none", host_bytes=4096),
    "host prefix": over_host_memory([0, 0, 2, 2, 0, 1, 2, 1, 2], gap=2, tokens=2, rows=2),
    "host blocks": over_host_memory([0, 2, 0, 1, 2, 2, 2, 2, 2], gap=1, tokens=4, rows=3),
    "reuse after abort": Scenario([Ask(prompt(6, i), tokens=9, abort_after=2) for i in range(4)], rows=1, pages=4),
    "penalties": Scenario([Ask(prompt(6, i), tokens=8, at=i, sampling=PENALTIES) for i in range(3)], rows=2),
    "dice and logprobs": Scenario([Ask(prompt(6, i), tokens=4, at=i, sampling=DICE) for i in range(2)]),
    "grammar": Scenario(
        [Ask(prompt(6, i), tokens=8, at=i, sampling=DICE, grammar=GRAMMAR if i % 2 else None) for i in range(4)]
    ),
    "grammar retracted": Scenario(
        [Ask(prompt(9, i), tokens=16, grammar=GRAMMAR) for i in range(3)], pages=11, cache="none"
    ),
    "n shares pages": Scenario([Ask(prompt(14), tokens=3, n=3, sampling=DICE)], chunk=12),
    "radix insert": Scenario([Ask([*SHARED, *prompt(4, i)], tokens=5, at=i) for i in range(5)], chunk=9, rows=3),
}

REACHES = {
    "prefill": {"extend"},
    "decode": {"decode"},
    "middle chunks": {"middle chunk"},
    "mixed": {"mixed"},
    "penalties": {"seeded history"},
    "rejoin": {"rejoin"},
    "host prefix": {"host prefix", "rejoin"},
}


def test_constrained_tokens_follow_each_other() -> None:
    """Every token depends on the one before, so one that was accepted twice, late or for another would show."""
    for name in ("grammar", "grammar retracted"):
        scenario = SCENARIOS[name]
        outcome = play_lazily(scenario, 1, eagerness=0.0)
        assert_clean(outcome)
        for ask, tokens in zip(scenario.asks, outcome.tokens, strict=True):
            if ask.grammar is not None:
                assert follows(tokens), (name, tokens)
    assert outcome.stats.preemptions > 0


def in_mode(scenario: Scenario, seed: int) -> Scenario:
    return dataclasses.replace(scenario, assert_mode=("count", "trap", "off")[seed % 3])


def assert_clean(outcome: Outcome) -> None:
    assert not outcome.races and outcome.failure is None, outcome.story
    assert not any(outcome.stats.assert_failures.values()), outcome.stats.assert_failures


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_race_and_the_tokens_of_a_plain_run(name: str, seed: int) -> None:
    scenario = SCENARIOS[name]
    plain = play_plainly(scenario)
    seen: set[str] = set()
    for number in (*SEEDS, seed):
        outcome = play_lazily(in_mode(scenario, number), number)
        assert_clean(outcome)
        assert outcome.same_streams(plain, scenario), (number, outcome.tokens, plain.tokens)
        assert outcome.accesses > 100
        seen |= outcome.kinds
    assert REACHES.get(name, set()) <= seen


def test_prefixes_in_host_memory_whatever_comes(seed: int) -> None:
    print(f"seed {seed}")
    rng, seen, played = random.Random(seed), set[str](), 0
    # About every second one finds a prefix there.
    while played < 5 or ("host prefix" not in seen and played < 50):
        played += 1
        prompts, sizes = [rng.randrange(3) for _ in range(9)], [rng.randint(1, 4) for _ in range(2)]
        scenario = over_host_memory(
            prompts, gap=sizes[0], tokens=sizes[1], rows=rng.randint(2, 3), blocks=rng.randint(3, 9)
        )
        outcome = play_lazily(scenario, rng.randrange(1000), eagerness=rng.random())
        assert_clean(outcome)
        assert outcome.same_streams(play_plainly(scenario), scenario)
        seen |= outcome.kinds
    assert "host prefix" in seen


@pytest.mark.parametrize("name", ["decode", "middle chunks", "mixed", "retraction"])
def test_a_plain_run_is_right(name: str) -> None:
    scenario = SCENARIOS[name]
    assert play_plainly(scenario).tokens == [expected_tokens(a.prompt, a.tokens, VOCAB) for a in scenario.asks]


@pytest.mark.parametrize("number", SEEDS)
def test_d03_row_reused_while_forward_stalled(number: int) -> None:
    """One row; its request ends by a stop token while the next step, with the old row, has not begun to run."""
    answers = [expected_tokens(prompt(6, i), 9, VOCAB) for i in range(4)]
    ends = [next(n for n in range(2, 9) if tokens[n] not in tokens[:n]) for tokens in answers]
    asks = [
        Ask(prompt(6, i), tokens=9, sampling={"stop_token_ids": (tokens[end],)})
        for i, (tokens, end) in enumerate(zip(answers, ends, strict=True))
    ]
    outcome = play_lazily(Scenario(asks, rows=1, pages=4, cache="none"), number, eagerness=0.0)
    assert_clean(outcome)
    assert outcome.stats.stale_results > 0, "some step was submitted for a request that had ended"
    assert outcome.tokens == [tokens[: end + 1] for tokens, end in zip(answers, ends, strict=True)]


@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.parametrize("name", ["retraction", "radix insert"])
def test_d07_pages_change_hands_while_forward_stalled(name: str, number: int) -> None:
    """Retraction and insertion into the prefix cache happen at plan time, behind a device that stands still."""
    scenario = SCENARIOS[name]
    outcome = play_lazily(scenario, number, eagerness=0.0)
    assert_clean(outcome)
    assert outcome.stats.preemptions > 0 if name == "retraction" else outcome.stats.cached_tokens > 0
    assert outcome.tokens == [expected_tokens(ask.prompt, ask.tokens, VOCAB) for ask in scenario.asks]


def test_a_real_model_is_ordered_too(tmp_path: Path) -> None:
    """Attention backend, workspaces and all, from a checkpoint."""
    checkpoint = make_checkpoint("llama", tmp_path / "llama", seed=0)
    model = load_model(ModelConfig(str(checkpoint), native="off"), torch.device("cpu"), None)
    asks: Sequence[Ask] = [Ask(prompt(11), tokens=3), Ask(prompt(7), tokens=4, sampling=PENALTIES), Ask(SHARED, at=1)]
    scenario = Scenario([*asks, Ask([*SHARED, 3], tokens=2, at=3, n=2, sampling=DICE)], chunk=8)
    plain = play_plainly(scenario, model)
    outcome = play_lazily(scenario, 3, model)
    assert_clean(outcome)
    assert outcome.tokens == plain.tokens


def test_window_pages_change_hands_in_order(tmp_path: Path, seed: int) -> None:
    """A pool of two windows and a half for three long requests: pages go from hand to hand in almost every step."""
    checkpoint = make_checkpoint("cohere2", tmp_path / "cohere", seed=0, sliding_window=8)
    model = load_model(ModelConfig(str(checkpoint), native="off"), torch.device("cpu"), None)
    asks = [Ask(prompt(25), tokens=6), Ask(prompt(3), tokens=14, at=1), Ask([*prompt(25)[:20], 5, 6], tokens=4, at=5)]
    scenario = Scenario(asks, chunk=8, window_tokens=10 * 4)
    plain = play_plainly(scenario, model)
    outcome = play_lazily(scenario, seed, model)
    assert_clean(outcome)
    assert outcome.tokens == plain.tokens
    assert {pool.name: pool.capacity for pool in outcome.stats.pools}["swa_page"] == 10


@pytest.mark.parametrize("kind", ["cohere2", pytest.param("mamba2", marks=pytest.mark.nightly)])
def test_windows_and_states_come_back_in_order(tmp_path: Path, kind: str, seed: int) -> None:
    """Pages, windows, snapshots and blocks of host memory all change hands while prefixes go and come."""
    print(f"seed {seed}")
    fields = {"sliding_window": 8} if kind == "cohere2" else {}
    checkpoint = make_checkpoint(kind, tmp_path / kind, seed=0, **fields)
    model = load_model(ModelConfig(str(checkpoint), native="off"), torch.device("cpu"), None)
    over = over_host_memory([0, 0, 2, 2, 0, 1, 2, 1, 2, 0], gap=2, tokens=2, rows=2)
    scenario = dataclasses.replace(over, pages=8, host_bytes=(9 if fields else 6) << 18)
    scenario = dataclasses.replace(scenario, window_tokens=10 * 4 if fields else None)
    plain, fetched, evicted = play_plainly(scenario, model), 0, 0
    for number in (0, 1, seed):
        outcome = play_lazily(scenario, number, model)
        assert_clean(outcome)
        assert outcome.tokens == plain.tokens
        fetched, evicted = fetched + outcome.stats.host_fetched_tokens, evicted + outcome.stats.host_evicted_tokens
    assert fetched and evicted
