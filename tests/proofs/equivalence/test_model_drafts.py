"""A draft model changes no output, whatever it says, and says the right thing wherever it should know.

A model that drafts for itself knows: it computes what the target computes, and draws by the same random numbers. So
each of its drafts is right, greedy or not, wherever the tokens of a row came from: chunks, found pages, the start after
a retraction, steps without drafts. A key that is missing or wrong would make one of them wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from core.batch.forward_batch import ForwardBatch
from core.batch.result import StepResult
from core.batch.spec_plan import NO_DRAFTS, Aim
from core.config import ModelConfig
from core.memory.draft_pool import DraftPool
from core.models.base import Model
from core.models.loader import load_model
from core.scheduler.draft_depth import Depth
from core.scheduler.outputs import Ending, StepOutputs
from core.speculation.calibration import Calibration
from core.speculation.draft_text import DraftText, Run
from core.speculation.drafter import Ran
from core.speculation.model_drafter import ModelDrafter
from core.speculation.voice import Voice
from core.types.arrays import Ints
from core.types.io import FinishReason, Pooling
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_speculation import MOST, Player, Seen, Setting, assert_same, requests
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.fakes.fixed_depth import FixedDepth

CPU = torch.device("cpu")
FREE = ("greedy", "temperature", "hot", "top_p", "top_k", "min_p", "filters", "logprobs", "greedy logprobs")
"""Options that depend on no text: a draft model can follow them."""


class ByTurns:
    """A `Depth` that wants drafts in two steps of five."""

    def __init__(self) -> None:
        self._steps = 0

    def aim(self, rows: int) -> Aim:
        self._steps += 1
        return Aim(MOST) if self._steps % 5 < 2 else NO_DRAFTS

    def observe(self, result: StepResult) -> None:
        pass


@pytest.fixture(params=[FixedDepth(MOST), ByTurns()], ids=["always", "by turns"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Depth:
    """Instead of one that follows a clock."""
    chosen: Depth = request.param
    monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: chosen)
    return chosen


@pytest.fixture
def target(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("qwen3")


def load(path: Path, context: int | None = 96) -> Model:
    return load_model(ModelConfig(str(path), dtype="float32", native="wait", context_length=context), CPU)


def both_ways(
    path: Path, draft: Path, reqs: Callable[[], list[Req]], setting: dict[str, Any]
) -> tuple[list[Seen], list[Seen], Player]:
    plain = Player(Setting(**setting), load(path), None).play(reqs())
    player = Player(Setting(**setting, method=f"draft:{draft}"), load(path), None)
    return plain, player.play(reqs()), player


SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "one after the other": {"overlap": False},
    "pages of one": {"page_size": 1, "chunk": 16},
    "long pages": {"page_size": 16, "chunk": 16},
    "retractions": {"tokens": 112, "rows": 6},
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_model_is_always_right_of_itself(setting: dict[str, Any], target: Path, depth: Depth, seed: int) -> None:
    reqs = lambda: requests(VOCAB_SIZE, seed, FREE)  # noqa: E731
    plain, drafted, player = both_ways(target, target, reqs, setting)
    assert_same(plain, drafted, reqs())
    verified, right = player.drafts.tokens, player.drafts.accepted
    if player.stats.preemptions and isinstance(depth, ByTurns):
        # A row that gave way while it waited for the draft model found pages again that have no part of that.
        assert verified >= right > 0.5 * verified
    else:
        assert verified == right > 20


@pytest.mark.parametrize("overlap", [True, False])
def test_no_draft_of_another_model_changes_an_output(
    overlap: bool, target: Path, checkpoint_of: Callable[[str], Path], depth: Depth, seed: int
) -> None:
    reqs = lambda: requests(VOCAB_SIZE, seed)  # noqa: E731
    plain, drafted, player = both_ways(target, checkpoint_of("llama"), reqs, {"overlap": overlap})
    assert_same(plain, drafted, reqs())
    assert player.drafts.tokens > 2 * player.drafts.accepted


def play(path: Path, draft: Path, reqs: list[Req]) -> tuple[list[Seen], Player]:
    player = Player(Setting(method=f"draft:{draft}"), load(path), None)
    return player.play(reqs), player


def greedy(prompt: np.ndarray, most: int, **given: Any) -> Req:
    return Req("r", 0, prompt, SamplingParams(temperature=0.0, ignore_eos=True), 1, most, **given)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: FixedDepth(MOST))


@pytest.mark.usefixtures("always")
def test_pages_that_are_found_again_hold_the_part_of_the_draft_model(target: Path, seed: int) -> None:
    """The second prompt goes on where the first output ended, and all but its end is found."""
    prompt = np.random.default_rng(seed).integers(3, VOCAB_SIZE, 33)
    player = Player(Setting(method=f"draft:{target}", overlap=False), load(target), None)
    (first,) = player.play([greedy(prompt, 13)], stop=False)
    player.play([greedy(np.array([*prompt, *first.tokens]), 20)])
    assert player.stats.cached_tokens >= 40
    assert player.drafts.tokens == player.drafts.accepted > 20


@pytest.mark.usefixtures("always")
def test_pages_without_a_part_of_the_draft_model_break_nothing(target: Path, seed: int) -> None:
    """They were computed for a request that is not drafted for."""
    prompt = np.random.default_rng(seed).integers(3, VOCAB_SIZE, 60)
    plain = Player(Setting(), load(target), None).play([greedy(prompt, 20)])
    player = Player(Setting(method=f"draft:{target}", overlap=False), load(target), None)
    embedding = greedy(prompt, 1, pooling=Pooling.MEAN)
    player.play([embedding], stop=False)
    assert_same(plain, player.play([greedy(prompt, 20)]), [embedding])


@pytest.mark.usefixtures("always")
def test_a_row_behind_the_context_of_the_draft_model_goes_on_without_drafts(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One prompt grows beyond it, one is longer from the start; the one that stays shorter has its drafts."""
    short = make_checkpoint("qwen3", tmp_path / "short", max_position_embeddings=48)
    places: list[int] = []
    guess = ModelDrafter._next

    def noting(drafter: ModelDrafter, lines: Ints, lens: Ints, tokens: Ints) -> ForwardBatch:
        places.extend(lens.tolist())
        return guess(drafter, lines, lens, tokens)

    monkeypatch.setattr(ModelDrafter, "_next", noting)
    rng = np.random.default_rng(seed)
    reqs = lambda: [greedy(prompt, 20) for prompt in prompts]  # noqa: E731
    prompts = [rng.integers(3, VOCAB_SIZE, length) for length in (5, 40, 47, 48, 60)]
    plain = Player(Setting(), load(target), None).play(reqs())
    drafted, player = play(target, short, reqs())
    assert_same(plain, drafted, reqs())
    assert player.drafts.tokens == player.drafts.accepted > 15
    assert max(places) == 47, "the last position that the draft model knows"


@pytest.mark.usefixtures("always")
def test_a_draft_model_computes_no_token_behind_its_context(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Nor the newest one of a row that has just filled it: a table of positions would have no entry for that."""
    short = make_checkpoint("qwen3", tmp_path / "short", max_position_embeddings=48)
    furthest, whole = list[int](), ModelDrafter._whole

    def noting(drafter: ModelDrafter, run: Run, wanted: Ints) -> ForwardBatch:
        furthest.append(int(run.positions.max()))
        return whole(drafter, run, wanted)

    monkeypatch.setattr(ModelDrafter, "_whole", noting)
    prompts = [np.random.default_rng([seed, n]).integers(3, VOCAB_SIZE, n) for n in (5, 40, 46, 47, 48, 49, 60)]
    reqs = lambda: [greedy(prompt, 20) for prompt in prompts]  # noqa: E731
    plain = Player(Setting(), load(target), None).play(reqs())
    drafted, _ = play(target, short, reqs())
    assert_same(plain, drafted, reqs())
    assert max(furthest) == 47


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("length", [1, 90, 95])
def test_up_to_the_end_of_the_context(length: int, target: Path, seed: int) -> None:
    prompt = np.random.default_rng(seed).integers(3, VOCAB_SIZE, length)
    plain = Player(Setting(), load(target), None).play([greedy(prompt, 96 - length)])
    drafted, player = play(target, target, [greedy(prompt, 96 - length)])
    assert plain == drafted and len(plain[0].tokens) == 96 - length
    assert player.drafts.tokens == player.drafts.accepted


@pytest.mark.usefixtures("always")
def test_as_many_drafts_are_right_as_the_draft_model_alone_would_guess(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Step by step, against a model by `transformers` that computes each text afresh, without a cache.

    Assisted generation of transformers 5.24 is no oracle: there drafts after wrong ones differ from what its assistant
    says of the same text without a cache.
    """
    draft = make_checkpoint("qwen3", tmp_path / "nudged")
    nudge(draft)
    prompt = np.random.default_rng(seed).integers(3, VOCAB_SIZE, 12)
    player = Player(Setting(method=f"draft:{draft}", overlap=False), load(target), None)
    steps: list[int] = []
    notes = DraftText.note

    def noting(text: DraftText, ran: Ran, calibration: Calibration) -> None:
        steps.extend(ran.counts.tolist())
        notes(text, ran, calibration)

    monkeypatch.setattr(DraftText, "note", noting)
    (seen,) = player.play([greedy(prompt, 60)])
    text, expected = [*prompt.tolist(), *seen.tokens], [1]
    guesser = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    while (at := len(prompt) + sum(expected)) < len(text):
        expected.append(1 + right_guesses(guesser, text, at))
    # The last step has no room for all.
    assert steps[:-1] == expected[: len(steps) - 1]
    assert player.drafts.accepted > 5


def right_guesses(model: torch.nn.Module, text: list[int], at: int) -> int:
    """How many of `MOST` greedy tokens of `model` behind `text[:at]` are those of `text`."""
    for count, token in enumerate(text[at : at + MOST]):
        with torch.inference_mode():
            logits = model(torch.tensor([text[: at + count]])).logits
        if int(logits[0, -1].argmax()) != token:
            return count
    return min(MOST, len(text) - at)


def nudge(path: Path) -> None:
    """Make the model at `path` a little different, so that it is right often and not always."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for name, weight in weights.items():
        if weight.dim() == 2 and "embed" not in name:
            weights[name] = weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


@pytest.mark.usefixtures("always")
def test_windows_of_the_target_and_of_the_draft_model(checkpoint_of: Callable[[str], Path], seed: int) -> None:
    """The target passes pages of its windows; the draft model keeps all. Not native: rounding may turn a draft."""
    path = checkpoint_of("gemma2")
    reqs = lambda: requests(VOCAB_SIZE, seed, ("greedy", "filters") * 4)  # noqa: E731
    plain, drafted, player = both_ways(path, path, reqs, {})
    for one, other in zip(plain, drafted, strict=True):
        assert one.tokens == other.tokens
    assert player.drafts.accepted > 0.9 * player.drafts.tokens > 18


@pytest.mark.usefixtures("always")
def test_rows_that_do_without_drafts_beside_rows_that_have_them(target: Path, seed: int) -> None:
    def reqs() -> list[Req]:
        made = requests(VOCAB_SIZE, seed, FREE)
        for req in made[::2]:
            req.speculative = False
        return made

    plain, drafted, player = both_ways(target, target, reqs, {})
    assert_same(plain, drafted, reqs())
    assert player.drafts.tokens == player.drafts.accepted > 10


class Leaving(Player):
    """Every third of its requests is cancelled after four outputs, while steps that have it are in flight."""

    def _emit(self, outputs: StepOutputs, now: float) -> None:
        super()._emit(outputs, now)
        for req, seen in self._seen.items():
            if req.seed % 3 == 0 and seen.reason is None and len(seen.tokens) >= 4:
                self._scheduler.intake.end(Ending(req, reason=FinishReason.CANCELLED))


@pytest.mark.usefixtures("always")
def test_rows_of_cancelled_requests_are_used_again(target: Path, seed: int) -> None:
    reqs = [*requests(VOCAB_SIZE, seed, FREE), *requests(VOCAB_SIZE, seed + 1, FREE)]
    player = Leaving(Setting(method=f"draft:{target}"), load(target), None)
    reasons = {seen.reason for seen in player.play(reqs)}
    assert reasons == {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert player.drafts.tokens == player.drafts.accepted > 20


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("method", ["_whole", "_next"])
def test_without_memory_for_the_draft_model_there_are_no_drafts(
    method: str, target: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Every third pass finds none, prompts too. Rows then wait, and are caught up with."""
    usual, calls = getattr(ModelDrafter, method), itertools.count()

    def tight(*given: Any) -> ForwardBatch:
        if next(calls) % 3 == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        found: ForwardBatch = usual(*given)
        return found

    monkeypatch.setattr(ModelDrafter, method, tight)
    reqs = lambda: requests(VOCAB_SIZE, seed, FREE)  # noqa: E731
    plain, drafted, player = both_ways(target, target, reqs, {})
    assert_same(plain, drafted, reqs())
    assert next(calls) > 6 and player.drafts.accepted > 5


@pytest.mark.usefixtures("always")
def test_nothing_of_a_former_owner_stands_in_a_gap(target: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """All pages once had numbers that any probability would show; then an embedding leaves a gap that is found."""
    pools: list[DraftPool] = []
    made, say, finite = DraftPool.__init__, Voice.say, list[bool]()

    def noting(pool: DraftPool, *given: Any) -> None:
        made(pool, *given)
        pools.append(pool)

    def checking(voice: Voice, logits: torch.Tensor, at: Ints, lens: Ints) -> tuple[Ints, Any]:
        finite.append(bool(logits.isfinite().all()))
        return say(voice, logits, at, lens)

    monkeypatch.setattr(DraftPool, "__init__", noting)
    monkeypatch.setattr(Voice, "say", checking)
    prompt = np.random.default_rng(seed).integers(3, VOCAB_SIZE, 60)
    player = Player(Setting(method=f"draft:{target}", overlap=False), load(target), None)
    for spec in pools[0].kv.layers:
        pools[0].kv.k(spec.layer_id).fill_(torch.nan)
        pools[0].kv.v(spec.layer_id).fill_(torch.nan)
    player.play([greedy(prompt, 1, pooling=Pooling.MEAN)], stop=False)
    player.play([greedy(prompt, 20)])
    assert player.stats.cached_tokens > 40 and len(finite) > 10 and all(finite)
