"""Outputs with speculation are those without it, token for token, whatever drafts say and whatever is asked.

Native code gives equal logits for a token alone and among drafts, so log probabilities are equal too, bit for bit. Sums
of other kernels come in another order there: of these a first difference would be told, and none is expected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from core.device.streams import DeviceStreams
from core.engine.build import assemble
from core.engine.speculation import Speculation
from core.models.base import Model
from core.models.loader import load_model
from core.scheduler.outputs import Ending, StepOutputs
from core.text.tokenizer import Tokenizer
from core.types.io import FinishReason
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from core.types.stats import DraftStats, EngineStats
from tests.proofs.happens_before.hash_model import HashModel
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE
from tests.support.fakes.adversaries import ADVERSARIES, KnowingDrafter, Says, always_right, like_a_coin
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.fakes.step_grammar import StepGrammar, follows
from tests.support.sampling_matrix import SAMPLING_MATRIX

MOST, CONTEXT, OUTPUTS = 5, 96, 24
CPU = torch.device("cpu")

OPTIONS: dict[str, dict[str, Any]] = {
    **SAMPLING_MATRIX,
    # Hot, and fond of the end: without the minimum these outputs would end at once.
    "min_tokens": {"temperature": 3.0, "min_tokens": 12, "ignore_eos": False, "logit_bias": {EOS_ID: 9.0}},
    "greedy logprobs": {"logprobs": True},
}


@dataclass(slots=True)
class Seen:
    """What the client of one output saw."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, ...]] = field(default_factory=list)
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is built."""

    page_size: int = 4
    chunk: int = 32
    overlap: bool = True
    tokens: int | None = 1024
    rows: int = 4
    method: str = "off"

    def config(self) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig("given", context_length=CONTEXT),
            memory=MemoryConfig(self.page_size, self.rows, self.tokens),
            scheduler=SchedulerConfig(chunked_prefill_size=self.chunk),
            executor=ExecutorConfig(device="cpu", overlap=self.overlap, assert_mode="trap"),
            speculation=SpeculationConfig(self.method, MOST),
        )


def requests(vocab: int, seed: int, names: Sequence[str] = tuple(OPTIONS)) -> list[Req]:
    """Two for each kind of option, of mixed lengths, in a random order."""
    rng = np.random.default_rng(seed)
    made = []
    for name in rng.permutation([*names, *names]).tolist():
        options = {"temperature": 0.0, "ignore_eos": True, **OPTIONS[name]}
        prompt, most = rng.integers(3, vocab, rng.integers(1, 40)), int(rng.integers(1, OUTPUTS + 1))
        made.append(Req(name, 0, prompt, SamplingParams(**options), int(rng.integers(2**40)), most))
    return made


class Player:
    """An engine without a loop of its own: it steps until all requests have ended."""

    def __init__(
        self, setting: Setting, model: Model, speculation: Speculation | None, streams: DeviceStreams | None = None
    ) -> None:
        self.built = assemble(setting.config(), model, tokenizer(), streams or DeviceStreams(CPU), speculation)
        self._news = threading.Event()
        self._executor = self.built.new_executor(self._news.set)
        self._scheduler = self.built.new_scheduler(self._executor, self._emit)
        self._seen: dict[Req, Seen] = {}

    @property
    def stats(self) -> EngineStats:
        """What was counted so far."""
        return self._scheduler.stats

    @property
    def drafts(self) -> DraftStats:
        """What became of drafts so far."""
        found = self.stats.drafts
        assert found is not None, "speculation is on"
        return found

    def play(self, reqs: Sequence[Req], *, stop: bool = True) -> list[Seen]:
        """What came of each; everything is given back, and no device check has failed. Unless it is to `stop`, others
        may be played after these.
        """
        self.ask(reqs)
        while self._scheduler.has_work:
            self._news.clear()
            if not self._scheduler.step(0.0) and self._executor.in_flight:
                assert self._news.wait(60.0), "no step ends"
        if stop:
            self._executor.stop()
        memory = self._scheduler.memory
        memory.check_integrity()
        assert not any(pool.used for pool in memory.stats())
        assert not any(self._scheduler.stats.assert_failures.values())
        return [self._seen[req] for req in reqs]

    def ask(self, reqs: Sequence[Req]) -> None:
        """Put `reqs` into the queue."""
        for req in reqs:
            self._seen[req] = Seen()
            self._scheduler.intake.add(req)

    def _emit(self, outputs: StepOutputs, now: float) -> None:
        for step in outputs.tokens:
            for i, (req, token) in enumerate(zip(step.reqs, step.tokens, strict=True)):
                seen = self._seen[req]
                assert step.positions[i] == len(seen.tokens) and seen.reason is None
                seen.tokens.append(token)
                if req.params.logprobs:
                    assert step.logprobs is not None
                    row, count = step.logprob_rows[i], req.params.top_logprobs
                    values = [step.logprobs.values[row], *step.logprobs.top_values[row][:count]]
                    named = len(req.params.logprob_token_ids)
                    values += [] if step.logprobs.chosen is None else step.logprobs.chosen[row][:named].tolist()
                    seen.logprobs.append((*map(float, values), *step.logprobs.top_ids[row][:count].tolist()))
        for ended in outputs.ended:
            self._end(ended)

    def _end(self, ended: Ending) -> None:
        assert ended.error is None, ended.error
        seen = self._seen[ended.req]
        assert seen.reason is None and ended.reason is not None
        seen.reason = ended.reason
        assert ended.req.outputs.tolist() == seen.tokens


def both_ways(
    setting: Setting,
    model: Callable[[], Model],
    reqs: Callable[[], list[Req]],
    says: Says,
    vocab: int,
    player: type[Player] = Player,
) -> tuple[list[Seen], list[Seen], KnowingDrafter]:
    """(outputs without speculation, with it, what drafted)."""
    plain = player(setting, model(), None).play(asked := reqs())
    truth = [[*req.prompt.tolist(), *seen.tokens] for req, seen in zip(asked, plain, strict=True)]
    drafter = KnowingDrafter(truth, says, vocab)
    speculation = Speculation(drafter, MOST, FixedDepth(MOST))
    return plain, player(setting, model(), speculation).play(reqs()), drafter


def same_but_for_rounding(plain: list[Seen], speculated: list[Seen], reqs: list[Req]) -> None:
    """Tokens and ends are equal, and log probabilities nearly."""
    for req, one, other in zip(reqs, plain, speculated, strict=True):
        assert replace(one, logprobs=[]) == replace(other, logprobs=[]), req.request_id
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)


def assert_same(plain: list[Seen], speculated: list[Seen], reqs: list[Req]) -> None:
    for req, one, other in zip(reqs, plain, speculated, strict=True):
        assert one == other, f"{req.request_id}: {one} and {other}"


VOCAB = 331


def hash_model() -> Model:
    return HashModel(VOCAB, CONTEXT)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("says", ADVERSARIES, ids=lambda each: each.__name__)
def test_no_draft_changes_an_output(says: Says, overlap: bool, seed: int) -> None:
    setting, reqs = Setting(overlap=overlap), lambda: requests(VOCAB, seed)
    plain, speculated, drafter = both_ways(setting, hash_model, reqs, says, VOCAB)
    assert_same(plain, speculated, reqs())
    assert (drafter.accepted > 0) == says.__name__.startswith(("always_right", "right_then"))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [16, 512])
def test_whatever_pages_and_chunks_are(page_size: int, chunk: int, seed: int) -> None:
    setting, reqs = Setting(page_size, chunk), lambda: requests(VOCAB, seed + 1)
    plain, speculated, drafter = both_ways(setting, hash_model, reqs, like_a_coin(seed), VOCAB)
    assert_same(plain, speculated, reqs())
    assert drafter.accepted > 0


def test_rows_that_give_way_go_on_where_they_were(seed: int) -> None:
    setting, reqs = Setting(tokens=112, rows=6), lambda: requests(VOCAB, seed + 2)
    plain, speculated, drafter = both_ways(setting, hash_model, reqs, like_a_coin(seed), VOCAB)
    assert_same(plain, speculated, reqs())
    assert drafter.accepted > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_constrained_rows_beside_drafts(overlap: bool, seed: int) -> None:
    """They have one place each, among rows that have several."""

    def reqs() -> list[Req]:
        made = requests(VOCAB, seed + 5)
        for req in made[::3]:
            req.grammar = StepGrammar()
        return made

    plain, speculated, drafter = both_ways(Setting(overlap=overlap), hash_model, reqs, always_right, VOCAB)
    assert_same(plain, speculated, reqs())
    for req, seen in zip(reqs(), speculated, strict=True):
        assert req.grammar is None or follows(seen.tokens)
    assert drafter.accepted > 0


def test_penalties_count_the_drafts_before_each_place(seed: int) -> None:
    """Of eleven tokens most come again and again."""
    reqs = lambda: requests(11, seed, [name for name in OPTIONS if "penalt" in name] * 3)  # noqa: E731
    plain, speculated, drafter = both_ways(Setting(), lambda: HashModel(11, CONTEXT), reqs, always_right, 11)
    assert_same(plain, speculated, reqs())
    assert drafter.accepted > 0


@cache
def tokenizer() -> Tokenizer:
    """Any will do: requests come as ids."""
    from core.models.bundled import bundled_model_dir

    return Tokenizer.load(str(bundled_model_dir()))


@pytest.mark.parametrize("says", [always_right, like_a_coin], ids=lambda each: each.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_code_is_equal_bit_for_bit(
    says: Any, dtype: str, checkpoint_of: Callable[[str], Path], seed: int
) -> None:
    config = ModelConfig(str(checkpoint_of("qwen3")), dtype=dtype, native="wait", context_length=CONTEXT)
    reqs = lambda: requests(VOCAB_SIZE, seed + 3)  # noqa: E731
    chosen = says(seed) if says is like_a_coin else says
    plain, speculated, drafter = both_ways(Setting(), lambda: load_model(config, CPU), reqs, chosen, VOCAB_SIZE)
    assert_same(plain, speculated, reqs())
    assert drafter.accepted > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt2"])
def test_models_by_transformers_say_the_same_tokens(
    kind: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In float64: sums in another order then move a draw by 1e-16, and none of these lies that near another token."""
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: torch.float64)
    # Grouped products of experts know no float64.
    monkeypatch.setattr(PreTrainedModel, "get_correct_experts_implementation", lambda *_: "eager")
    config = ModelConfig(str(checkpoint_of(kind)), native="off", context_length=CONTEXT)
    reqs = lambda: requests(VOCAB_SIZE, seed + 4)  # noqa: E731
    plain, speculated, drafter = both_ways(Setting(), lambda: load_model(config, CPU), reqs, always_right, VOCAB_SIZE)
    same_but_for_rounding(plain, speculated, reqs())
    assert drafter.accepted > 0
