"""What steps of several tokens take, and the settings that have it measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.config import EngineConfig, ModelConfig, SpeculationConfig
from core.device.streams import DeviceStreams
from core.engine import step_times
from core.engine.build import assemble
from core.engine.built_engine import BuiltEngine
from core.engine.step_times import TOKENS, time_steps
from core.errors import ConfigError, StartupError
from core.executor.step import StepRunner
from core.models.base import Model
from core.models.loader import load_model
from core.scheduler.draft_depth import AdaptiveDepth
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.happens_before.harness import CONTEXT, VOCAB, Scenario, tokenizer
from tests.proofs.happens_before.hash_model import HashModel, expected_tokens
from tests.support.encoder_decoders import make_encoder_decoder

CPU = torch.device("cpu")
PROMPT = [1, 2, 3, 4] * 5


def built(method: str, model: Model | None = None) -> BuiltEngine:
    config: EngineConfig = replace(Scenario(()).config(), speculation=SpeculationConfig(method))
    return assemble(config, model or HashModel(VOCAB, CONTEXT), tokenizer(), DeviceStreams(CPU))


def test_sizes_are_timed_and_rise() -> None:
    engine = built("ngram")
    executor = engine.new_executor(lambda: None)
    depth = engine.new_scheduler(executor, lambda outputs, now: None)._depth
    assert isinstance(depth, AdaptiveDepth)
    times = depth._times
    assert times.tokens[:3] == (1, 2, 4) and len(times.tokens) == len(times.seconds)
    assert times.seconds[0] > 0 and list(times.seconds) == sorted(times.seconds)


class Placed(HashModel):
    """Notes the last position that it is asked for, and computes nothing."""

    last = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.last = max(self.last, int(batch.positions.max()))
        return torch.zeros(len(batch.last_indices), self.spec.vocab_size)


def test_no_step_is_timed_that_the_context_has_no_places_for() -> None:
    config = replace(Scenario(()).config(), speculation=SpeculationConfig("ngram"))
    config, model = replace(config, model=replace(config.model, context_length=16)), Placed(VOCAB, 16)
    engine = assemble(config, model, tokenizer(), DeviceStreams(CPU))
    engine.new_scheduler(engine.new_executor(lambda: None), lambda outputs, now: None)
    assert model.last == 15


@pytest.mark.parametrize("alone", [True, False])
def test_ranks_time_the_same_steps_whatever_they_take(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a meeting of all: one rank that had no patience any more would leave the others waiting."""
    monkeypatch.setattr(step_times, "PATIENCE", 0.0)
    executor = built("ngram").new_executor(lambda: None)
    state = replace(executor._runner.state, alone=alone)  # type: ignore[attr-defined]
    assert len(time_steps(state).tokens) == (2 if alone else sum(each <= CONTEXT for each in TOKENS))


def test_no_step_is_timed_with_more_drafts_than_there_is_room_for() -> None:
    executor = built("ngram").new_executor(lambda: None)
    assert time_steps(executor._runner.state, draft_room=2).tokens == (1, 2)  # type: ignore[attr-defined]
    assert time_steps(executor._runner.state, draft_room=3).tokens == (1, 2, 4)  # type: ignore[attr-defined]


def test_timing_leaves_no_trace() -> None:
    """Padding row 0 stays padding, and a request gets what it gets without speculation."""
    engine = built("ngram")
    executor = engine.new_executor(lambda: None)
    runner: StepRunner = executor._runner  # type: ignore[attr-defined]
    runner.state.pool.check_padding()
    scheduler = engine.new_scheduler(executor, lambda outputs, now: None)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    req = Req("r", 0, torch.tensor(PROMPT).numpy(), params, 1, 20)
    scheduler.intake.add(req)
    while scheduler.has_work:
        scheduler.step(0.0)
    assert req.outputs.tolist() == expected_tokens(PROMPT, 20, VOCAB)


def test_off_is_off() -> None:
    engine = built("off")
    executor = engine.new_executor(lambda: None)
    assert engine.new_scheduler(executor, lambda outputs, now: None)._depth is None
    assert executor._runner.state.verification is None  # type: ignore[attr-defined]


def test_auto_does_without_and_a_name_insists(tmp_path: Path) -> None:
    config = ModelConfig(str(make_encoder_decoder("bart", tmp_path)), dtype="float32", context_length=64)
    engine = built("auto", load_model(config, CPU))
    assert engine.new_scheduler(engine.new_executor(lambda: None), lambda outputs, now: None)._depth is None
    with pytest.raises(StartupError, match="speculative=ngram is not possible: encoder-decoders"):
        built("ngram", load_model(config, CPU))


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculative"):
        SpeculationConfig("telepathy")
