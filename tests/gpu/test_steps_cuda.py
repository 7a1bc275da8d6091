"""Every kind of step on CUDA, with the device held back so that the host runs ahead as far as it may."""

from __future__ import annotations

import pytest
import torch

from core.device.streams import COPY, FORWARD, DeviceStreams
from tests.gpu.cuda import ONLY_ON_CUDA, StalledModel, stall_stash
from tests.proofs.happens_before.clocks import VectorClocks
from tests.proofs.happens_before.harness import CONTEXT, VOCAB, Ask, Scenario, play_on, play_plainly
from tests.proofs.happens_before.hash_model import HashModel, expected_tokens
from tests.proofs.happens_before.test_step_kinds import SCENARIOS, assert_clean, prompt
from tests.proofs.happens_before.test_threads import recorded, serve_some

pytestmark = ONLY_ON_CUDA

CUDA = torch.device("cuda")
ROUNDING = 1e-5
"""Of log probabilities, between the exponentials of a GPU and of a CPU."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_tokens_are_those_of_a_plain_run_on_the_cpu(name: str) -> None:
    scenario = SCENARIOS[name]
    outcome = play_on(scenario, DeviceStreams(CUDA), VectorClocks(), 0, HashModel(VOCAB, CONTEXT))
    assert_clean(outcome)
    assert outcome.same_streams(play_plainly(scenario), scenario, ROUNDING)


@pytest.mark.parametrize("stalled", ["forward", "stash"])
@pytest.mark.parametrize("name", ["retraction", "radix insert", "reuse after abort", "mixed"])
def test_d07_pages_and_rows_change_hands_behind_a_stalled_device(
    name: str, stalled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also D4 as far as it can occur here: a new owner's first write against the old owner's late stash."""
    scenario = SCENARIOS[name]
    if stalled == "stash":
        stall_stash(monkeypatch)
    model = StalledModel() if stalled == "forward" else HashModel(VOCAB, CONTEXT)
    outcome = play_on(scenario, DeviceStreams(CUDA), VectorClocks(), 1, model)
    monkeypatch.undo()
    assert_clean(outcome)
    assert outcome.same_streams(play_plainly(scenario), scenario, ROUNDING)


def test_d03_row_reused_while_forward_stalled() -> None:
    answers = [expected_tokens(prompt(6, i), 9, VOCAB) for i in range(4)]
    ends = [next(n for n in range(2, 9) if tokens[n] not in tokens[:n]) for tokens in answers]
    stops = [{"stop_token_ids": (tokens[end],)} for tokens, end in zip(answers, ends, strict=True)]
    asks = [Ask(prompt(6, i), tokens=9, sampling=stop) for i, stop in enumerate(stops)]
    scenario = Scenario(asks, rows=1, pages=4, cache="none")
    outcome = play_on(scenario, DeviceStreams(CUDA), VectorClocks(), 0, StalledModel())
    assert_clean(outcome)
    assert outcome.tokens == [tokens[: end + 1] for tokens, end in zip(answers, ends, strict=True)]


async def test_threads_and_streams_leave_nothing_unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder over real streams, events and threads."""
    clocks = VectorClocks()
    async with recorded(monkeypatch, clocks, DeviceStreams(CUDA, clocks)) as engine:
        await serve_some(engine)
    assert not clocks.races, clocks.story()
    assert {FORWARD, COPY} <= clocks.lanes
