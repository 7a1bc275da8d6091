"""Steps that verify drafts by grids, on streams that run late: no race, no look at the device, no other token."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.engine import build
from core.engine.speculation import GRID, Speculation
from core.executor.step import StepRunner
from tests.proofs.happens_before import lazy_ops, seeded_executor
from tests.proofs.happens_before.harness import CONTEXT, VOCAB, Ask, Outcome, Scenario, play_lazily, play_plainly
from tests.proofs.happens_before.lazy_streams import LazyStreams
from tests.proofs.happens_before.test_step_kinds import DICE, PENALTIES, SEEDS, assert_clean, in_mode, prompt
from tests.support.fakes.adversaries import Says, always_right, like_a_coin, right_then_wrong
from tests.support.fakes.device_hash_model import DeviceHashModel
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.fakes.grid_attention import GridAttention
from tests.support.fakes.late_drafter import LateDrafter
from tests.support.fakes.step_grammar import StepGrammar

MOST = 3

SCENARIOS = {
    "decode": Scenario([Ask(prompt(n), tokens=14) for n in (3, 5)]),
    "mixed": Scenario([Ask(prompt(5 + i), tokens=9, at=2 * i) for i in range(4)], chunk=8),
    "retraction": Scenario([Ask(prompt(9, i), tokens=16) for i in range(3)], pages=11, cache="none"),
    "reuse after abort": Scenario([Ask(prompt(6, i), tokens=9, abort_after=2) for i in range(4)], rows=1, pages=8),
    "penalties": Scenario([Ask(prompt(6, i), tokens=8, at=i, sampling=PENALTIES) for i in range(3)], rows=2),
    "dice and logprobs": Scenario([Ask(prompt(6, i), tokens=9, at=i, sampling=DICE) for i in range(2)]),
}


@pytest.fixture(autouse=True)
def _attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_attention", lambda *_: GridAttention())


def play_grids(scenario: Scenario, plain: Outcome, says: Says, seed: int, **how: Any) -> tuple[Outcome, LateDrafter]:
    asked = [ask for ask in scenario.asks for _ in range(ask.n)]
    truth = [[*ask.prompt, *tokens] for ask, tokens in zip(asked, plain.tokens, strict=True)]
    drafter = LateDrafter(truth, says, VOCAB)
    speculation = Speculation(drafter, MOST, FixedDepth(MOST), GRID)
    model = DeviceHashModel(VOCAB, CONTEXT)
    return play_lazily(scenario, seed, model, speculation=speculation, **how), drafter


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_race_and_the_tokens_of_a_plain_run(name: str, seed: int) -> None:
    scenario = SCENARIOS[name]
    plain, accepted = play_plainly(scenario), 0
    for number in (*SEEDS, seed):
        for says in (always_right, right_then_wrong, like_a_coin(number)):
            outcome, drafter = play_grids(in_mode(scenario, number), plain, says, number)
            assert_clean(outcome)
            assert outcome.same_streams(plain, scenario), (number, says, outcome.tokens, plain.tokens)
            accepted += drafter.accepted
    assert accepted > 0


def test_a_constrained_row_waits_and_the_others_have_drafts() -> None:
    asks = [
        Ask(prompt(6, i), tokens=8, at=i, sampling=DICE, grammar=StepGrammar() if i % 2 else None) for i in range(4)
    ]
    scenario = Scenario(asks)
    plain = play_plainly(scenario)
    outcome, drafter = play_grids(scenario, plain, always_right, 1)
    assert_clean(outcome)
    assert outcome.same_streams(plain, scenario) and drafter.accepted > 0


class Watch:
    """Looks for looks at the device while a step is launched."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launches = 0
        self._launching = False
        self._made: dict[int, torch.UntypedStorage] = {}
        self._keep_what_is_made(patch)
        launch = StepRunner.launch

        def watched(runner: StepRunner, *args: Any) -> Any:
            streams = runner.state.streams
            assert isinstance(streams, LazyStreams)
            before = streams.forward.done
            self._launching, self.launches = True, self.launches + 1
            launched = launch(runner, *args)
            self._launching = False
            assert streams.forward.done == before, "the device ran, so the launch has waited for it"
            return launched

        patch.setattr(StepRunner, "launch", watched)
        for name in ("numpy", "tolist"):
            patch.setattr(torch.Tensor, name, self._guarded(getattr(torch.Tensor, name)))

    def _keep_what_is_made(self, patch: pytest.MonkeyPatch) -> None:
        poisoned = lazy_ops.poisoned

        def kept(like: torch.Tensor) -> torch.Tensor:
            made = poisoned(like)
            self._made[made.untyped_storage().data_ptr()] = made.untyped_storage()
            return made

        patch.setattr(lazy_ops, "poisoned", kept)

    def _guarded(self, look: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def guarded(tensor: torch.Tensor) -> Any:
            # A recorder may look.
            recorder = sys._getframe(1).f_code.co_filename.endswith("clocks.py")
            if self._launching and not recorder:
                # Of an assertion that fails pytest would show all storages byte by byte: gigabytes for one of a pool.
                made = tensor.untyped_storage().data_ptr() in self._made
                assert not made, "read in place"
            return look(tensor)

        return guarded


@pytest.mark.parametrize("name", ["decode", "mixed", "penalties", "dice and logprobs", "retraction"])
def test_a_launch_reads_nothing_of_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device stands still but where a result is waited for, so whatever a launch reads has yet to be computed."""
    scenario = SCENARIOS[name]
    plain = play_plainly(scenario)
    monkeypatch.setattr(seeded_executor, "INTERRUPTIONS", 0.0)
    watch = Watch(monkeypatch)
    outcome, drafter = play_grids(scenario, plain, right_then_wrong, 1, eagerness=0.0)
    assert_clean(outcome)
    assert outcome.same_streams(plain, scenario)
    assert drafter.accepted > 0 and watch.launches > 4


def test_the_watch_sees_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeded_executor, "INTERRUPTIONS", 0.0)
    scenario = SCENARIOS["decode"]
    plain = play_plainly(scenario)
    Watch(monkeypatch)
    for look in (lambda lens: lens.numpy(), lambda lens: int(lens.max())):
        relay = StepRunner._places

        def looking(*args: Any, look: Callable[[torch.Tensor], Any] = look, relay: Any = relay) -> Any:
            rows, lens = relay(*args)
            look(lens)
            return rows, lens

        with monkeypatch.context() as patch:
            patch.setattr(StepRunner, "_places", looking)
            outcome, _ = play_grids(scenario, plain, always_right, 1, eagerness=0.0)
        assert isinstance(outcome.failure, AssertionError)
