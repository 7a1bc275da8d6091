"""Drafts from one step to the next: what is left in the relay, and what a wrong draft may not do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.attention.torch_native import TorchNativeAttention
from core.batch.forward_batch import ForwardBatch
from core.batch.result import StepResult
from core.batch.spec_plan import Aim, SpecPlan
from core.config import ModelConfig
from core.device.recorder import Recorder
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.engine.build import assemble
from core.engine.build_pools import build_pools
from core.engine.speculation import GRID, RAGGED, Speculation, way_of, why_no_speculation
from core.errors import Overloaded, StartupError
from core.executor.sampling_step import SamplingStep
from core.executor.speculator import Speculator
from core.executor.step import StepRunner
from core.memory.recurrent.state_pool import StateLayerSpec
from core.models.base import Model
from core.models.loader import load_model
from core.relay.resolve import DecodeRows, ResolvedInputs
from core.sampling.draw import BLOCK
from core.sampling.penalties import TokenHistory
from core.scheduler.draft_depth import Depth
from core.scheduler.outputs import Ending, StepOutputs
from core.scheduler.scheduler import Scheduler
from core.types.arrays import Ints
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.happens_before.harness import CONTEXT, VOCAB, Scenario, tokenizer
from tests.proofs.happens_before.hash_model import HashModel, expected_tokens
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.fakes.adversaries import KnowingDrafter, Says, always_right, right_then_wrong
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.fakes.grid_attention import GridAttention
from tests.unit.core.engine.test_short_of_memory import Tight

CPU = torch.device("cpu")
PROMPT = np.arange(1, 8, dtype=np.int64)
MOST = 4
POISON = VOCAB - 1
"""A token behind which a poisoned model computes NaN."""


class ChangingDepth:
    """A `Depth` that the test sets."""

    def __init__(self, count: int) -> None:
        self.count = count

    def aim(self, rows: int) -> Aim:
        return Aim(self.count)

    def observe(self, result: StepResult) -> None:
        pass


class PoisonedModel(HashModel):
    """Logits are NaN behind the token `POISON`."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = super().forward(batch)
        poisoned = batch.input_ids.index_select(0, batch.last_indices) == POISON
        return logits.masked_fill_(poisoned[:, None], float("nan"))


class World:
    """An engine without overlap, stepped by hand; it drafts `says` of what a plain run puts out."""

    def __init__(self, says: Says, depth: Depth, model: HashModel | None = None, outputs: int = 12) -> None:
        self.ended: list[Ending] = []
        self.truth = [*PROMPT.tolist(), *expected_tokens(PROMPT.tolist(), outputs, VOCAB)]
        self.outputs = outputs
        speculation = Speculation(KnowingDrafter([self.truth], says, VOCAB), MOST, depth)
        model = model or HashModel(VOCAB, CONTEXT)
        built = assemble(Scenario(()).config(), model, tokenizer(), DeviceStreams(CPU), speculation)
        executor = built.new_executor(lambda: None)
        self.runner: StepRunner = executor._runner  # type: ignore[attr-defined]
        self.scheduler: Scheduler = built.new_scheduler(executor, self._emit)

    def ask(self, prompt: np.ndarray = PROMPT) -> Req:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        req = Req("r", 0, prompt, params, 1, self.outputs)
        self.scheduler.intake.add(req)
        return req

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.scheduler.step(0.0)

    def left(self, row: int) -> int:
        """How many drafts wait for the next step of `row`."""
        return int(self.runner._state.future_map.buffer("draft_len")[row])

    def _emit(self, outputs: StepOutputs, now: float) -> None:
        self.ended += outputs.ended


def test_right_drafts_come_several_at_a_time() -> None:
    world = World(always_right, FixedDepth(MOST))
    req, steps = world.ask(), 0
    while world.scheduler.has_work:
        world.scheduler.step(0.0)
        steps += 1
    assert req.outputs.tolist() == world.truth[len(PROMPT) :]
    assert steps == 1 + 3 + 1, "the prompt, twelve outputs less one by up to five, and the last result"
    stats = world.scheduler.stats.drafts
    assert stats is not None and (stats.tokens, stats.accepted) == (8, 8)


def test_what_was_verified_and_what_was_right_is_counted() -> None:
    world = World(right_then_wrong, FixedDepth(MOST))
    world.ask()
    world.drain()
    stats = world.scheduler.stats.drafts
    # Three steps with two right of four, then one with room for one.
    assert stats is not None and (stats.tokens, stats.accepted) == (13, 7)
    assert (stats.steps, stats.rows, stats.dropped, stats.most) == (4, 4, 0, 1)
    assert stats.proposed_by_position == (4, 3, 3, 3) and stats.accepted_by_position == (4, 3, 0, 0)
    assert stats.draft_seconds > 0 and stats.verify_seconds > 0
    assert stats.draft_seconds + stats.verify_seconds < world.scheduler.stats.device_busy_seconds
    assert stats.acceptance_rate == 7 / 13 and stats.acceptance_length == 1 + 7 / 4


@pytest.mark.parametrize("most", [1, MOST])
def test_a_step_that_proposes_nothing_leaves_nothing(most: int) -> None:
    depth = ChangingDepth(most)
    world = World(always_right, depth)
    req = world.ask()
    world.scheduler.step(0.0)
    assert world.left(req.row) == most
    depth.count = 0
    world.scheduler.step(0.0)
    assert world.left(req.row) == 0
    depth.count = most
    world.drain()
    assert req.outputs.tolist() == world.truth[len(PROMPT) :]


def test_the_policy_hears_which_steps_had_prompts() -> None:
    """One chunk, then decode steps. All but the last, which has room for no draft, could have verified some."""
    seen: list[tuple[bool, bool]] = []

    class Noting(ChangingDepth):
        def observe(self, result: StepResult) -> None:
            seen.append((result.has_prompts, result.accepted is not None))

    world = World(always_right, Noting(MOST))
    world.ask()
    world.drain()
    assert len(seen) > 3 and seen == [(True, False), *[(False, True)] * (len(seen) - 2), (False, False)]


def test_a_new_owner_finds_no_drafts() -> None:
    """A prompt of two chunks leaves its row unwritten for a step."""
    world = World(always_right, FixedDepth(MOST))
    first = world.ask()
    world.scheduler.step(0.0)
    row = first.row
    world.drain()
    world.runner._state.future_map.buffer("draft_len")[row] = MOST
    second = world.ask(np.arange(20, 42, dtype=np.int64))
    world.scheduler.step(0.0)
    assert second.row == row and world.left(row) == 0


def test_nothing_is_computed_behind_the_last_token() -> None:
    """The last output is never fed back, so the token before it has the last place."""
    furthest: list[int] = []

    class Watched(HashModel):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            furthest.append(int(batch.positions.max()))
            return super().forward(batch)

    world = World(always_right, FixedDepth(MOST), Watched(VOCAB, CONTEXT), outputs=10)
    world.ask()
    world.drain()
    assert max(furthest) == len(PROMPT) + 10 - 2


@pytest.mark.parametrize(("length", "count"), [(4, 5), (5, 5), (6, 4), (8, 2), (9, 1)])
def test_a_row_that_is_further_than_the_plan_could_know_tries_less(length: int, count: int) -> None:
    """Under overlap the plan allows for the shortest that a row may be. This one ends at 10 tokens in the pools."""
    world = World(always_right, FixedDepth(MOST))
    speculator, future_map = world.runner._speculator, world.runner._state.future_map
    assert isinstance(speculator, Speculator)
    speculator._any_left = True
    future_map.buffer("drafts")[3], future_map.buffer("draft_len")[3] = torch.arange(1, MOST + 1), MOST
    batch: Any = SimpleNamespace(spec=SpecPlan(np.array([MOST]), np.array([10]), MOST), verifies=True)
    bounds = torch.tensor([4]), torch.tensor([9])
    inputs = ResolvedInputs(torch.tensor([7]), None, torch.tensor([length]))
    found = speculator.trial(batch, DecodeRows(torch.tensor([3]), *bounds), inputs, Staging(CPU))
    assert (1 if found is None else int(found.counts[0])) == count


def test_an_unwritten_row_accepts_nothing() -> None:
    world = World(always_right, FixedDepth(MOST))
    assert not world.runner._state.future_map.buffer("draft_len").any()


def test_numbers_behind_a_wrong_draft_fail_no_row() -> None:
    def poison_last(truth: list[int], most: int, vocab: int) -> list[int]:
        return [*truth[:1], (truth[1] + 1) % (vocab - 1), POISON, POISON]

    world = World(poison_last, FixedDepth(MOST), PoisonedModel(VOCAB, CONTEXT))
    assert POISON not in world.truth
    req = world.ask()
    world.drain()
    assert [ended.error for ended in world.ended] == [None]
    assert req.outputs.tolist() == world.truth[len(PROMPT) :]


def test_numbers_that_count_fail_the_row() -> None:
    """The request's own prompt ends with the token: its first sample means nothing, drafts or not."""
    world = World(right_then_wrong, FixedDepth(MOST), PoisonedModel(VOCAB, CONTEXT))
    world.ask(np.array([5, POISON], np.int64))
    world.drain()
    (ended,) = world.ended
    assert ended.error is not None and "non-finite" in str(ended.error)


def test_what_is_not_speculated_with_is_refused_by_name(tmp_path: Path) -> None:
    config = ModelConfig(str(make_encoder_decoder("bart", tmp_path)), dtype="float32", context_length=64)
    model: Model = load_model(config, CPU)
    speculation = Speculation(KnowingDrafter([], always_right, VOCAB), MOST, FixedDepth(MOST))
    with pytest.raises(StartupError, match="encoder-decoders"):
        assemble(Scenario(()).config(), model, tokenizer(), DeviceStreams(CPU), speculation)


def test_a_depth_beyond_the_columns_drafts_what_they_hold() -> None:
    world = World(always_right, FixedDepth(MOST + 2))
    req = world.ask()
    world.scheduler.step(0.0)
    assert world.left(req.row) == MOST
    world.drain()
    assert req.outputs.tolist() == world.truth[len(PROMPT) :]


def test_drafts_are_proposed_for_the_rows_that_will_run() -> None:
    """The first step has a prompt and no decode row; what it proposes is for the row that decodes next."""

    class Few(ChangingDepth):
        def aim(self, rows: int) -> Aim:
            return Aim(self.count if 0 < rows < 3 else 0)

    world = World(always_right, Few(MOST))
    req = world.ask()
    world.scheduler.step(0.0)
    assert world.left(req.row) == MOST


class Told:
    """A device companion that notes what it hears, and when."""

    recorder: Recorder | None = None

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def begin(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        self.heard.append("begin")

    def measured(self, prefix_lens: Ints, extend_lens: Ints, staging: Staging) -> None:
        self.heard.append((prefix_lens.tolist(), extend_lens.tolist()))


def test_companions_hear_what_a_step_computes_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two right of four: how long the row is, and where its last step has room for one, the plan does not know."""
    told = Told()

    class Saying(HashModel):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            told.heard.append("forward")
            return super().forward(batch)

    def with_one_more(*args: Any) -> Any:
        return replace(build_pools(*args), companions={"told": told})

    monkeypatch.setattr("core.engine.build.build_pools", with_one_more)
    world = World(right_then_wrong, FixedDepth(MOST), Saying(VOCAB, CONTEXT))
    world.ask()
    world.drain()
    lens = [([0], [7]), ([7], [5]), ([10], [5]), ([13], [5]), ([16], [2])]
    assert told.heard == [each for step in lens for each in ("begin", step, "forward")]


def test_what_can_take_drafts_is_a_decoder_and_on_accelerators_one_without_host_lengths() -> None:
    spec, cuda = replace(HashModel(VOCAB, CONTEXT).spec, capturable=True), way_of(torch.device("cuda"))
    assert way_of(CPU) is RAGGED and cuda is way_of(torch.device("xpu")) is GRID
    assert why_no_speculation(spec, RAGGED, "eagle", TorchNativeAttention) is None
    encoder: Any = SimpleNamespace(encoder=object(), state_layers=())
    assert "encoder" in str(why_no_speculation(encoder, RAGGED))
    assert why_no_speculation(spec, cuda, "ngram", GridAttention) is None
    recurrent: Any = replace(spec, state_layers=(StateLayerSpec(0, (), ()),))
    refused = [
        (why_no_speculation(spec, cuda, "eagle:HEAD", GridAttention), "eagle drafts on the CPU alone"),
        (why_no_speculation(spec, cuda, "ngram", TorchNativeAttention), "plans on the host"),
        (why_no_speculation(recurrent, cuda, "ngram", GridAttention), "states"),
        (why_no_speculation(replace(spec, capturable=False), cuda, "ngram", GridAttention), "promise"),
    ]
    for reason, said in refused:
        assert said in str(reason)


def test_memory_that_is_short_ends_the_row_that_it_lacks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that samples at random takes more memory than a greedy one; both have drafts."""
    world = World(lambda truth, most, vocab: [1] * most, FixedDepth(MOST))
    costly = Req("r", 0, PROMPT + 20, SamplingParams(temperature=0.9, ignore_eos=True), 1, 12)
    world.scheduler.intake.add(costly)
    cheap = world.ask()
    world.scheduler.step(0.0)
    Tight(monkeypatch, (SamplingStep, "sample")).limit = 8 * -(-VOCAB // BLOCK) * BLOCK - 1
    world.drain()
    errors = {ended.req: ended.error for ended in world.ended}
    assert isinstance(errors[costly], Overloaded) and errors[cheap] is None
    assert cheap.outputs.tolist() == world.truth[len(PROMPT) :]


def test_a_history_without_memory_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(TokenHistory, "start", refuse)
    world = World(always_right, FixedDepth(MOST))
    params = SamplingParams(temperature=0.0, ignore_eos=True, repetition_penalty=1.5)
    penalised = Req("r", 0, PROMPT + 20, params, 1, 12)
    first = world.ask()
    world.scheduler.intake.add(penalised)
    last = world.ask()
    world.drain()
    errors = {ended.req: ended.error for ended in world.ended}
    assert isinstance(errors[penalised], Overloaded) and errors[first] is errors[last] is None
    for req in (first, last):
        assert req.outputs.tolist() == world.truth[len(PROMPT) :]
