"""Recurrent models say with drafts what they say without, whatever the drafts are, and resume from states that they
kept while drafts were verified.

In float64, as in `test_speculation`: a layer that takes several tokens at once sums in another order than for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.config import EngineConfig, ModelConfig
from core.engine.speculation import Speculation
from core.models.base import Model
from core.models.loader import load_model
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_speculation import CPU, MOST, OPTIONS, OUTPUTS, Player, Seen, Setting
from tests.support.checkpoints import RECURRENT_CONFIGS, VOCAB_SIZE, make_checkpoint
from tests.support.fakes.adversaries import (
    KnowingDrafter,
    Says,
    always_right,
    always_wrong,
    like_a_coin,
    right_then_wrong,
)
from tests.support.fakes.fixed_depth import FixedDepth

CONTEXT = 96
QUICK = ("mamba2", "lfm2")
"""Kinds that play all adversaries: with a temporal state, and with a convolution alone."""
ROUNDING = "nemotron_h"
"""Computes in float32 whatever it is given, so there the outputs of random draws might differ."""
LIMITLESS = {"time_step_min": 1e-9}
"""Its modules keep limits of time steps in prompts and not in steps of one token (docs/reference/models.md), so a draft
may move logits where a limit binds. Native code keeps them everywhere: `test_native_recurrent`."""


@pytest.fixture(autouse=True)
def _doubles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = request.node.callspec.params["kind"]
    dtype = torch.float32 if kind == ROUNDING else torch.float64
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: dtype)
    # The kernel that multiplies the experts of several tokens at once knows no float64.
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_, **__: False)


@dataclass(frozen=True, slots=True)
class Keeping(Setting):
    """An engine that keeps states for a prefix cache every `interval` tokens."""

    interval: int = 4
    slots: int | None = None

    def config(self) -> EngineConfig:
        config = Setting.config(self)
        memory = replace(config.memory, state_track_interval=self.interval, max_state_slots=self.slots)
        return replace(config, memory=memory)


class Wavering:
    """A `Depth` that asks for another number of drafts in each step."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def aim(self, rows: int) -> Any:
        return FixedDepth(int(self._rng.integers(MOST + 1))).aim(rows)

    def observe(self, result: Any) -> None:
        """Changes nothing."""


@cache
def _model(path: Path) -> Model:
    return load_model(ModelConfig(str(path), native="off", context_length=CONTEXT), CPU)


def asked(seed: int, number: int = 6, *, greedy: bool = False) -> list[Req]:
    """Prompts that share beginnings, with mixed options, or `greedy` ones."""
    rng = np.random.default_rng(seed)
    names = ["greedy logprobs"] if greedy else list(OPTIONS)
    shared, made = rng.integers(3, VOCAB_SIZE, 30), []
    for name in rng.choice(names, number).tolist():
        options = {"temperature": 0.0, "ignore_eos": True, **OPTIONS[name]}
        prompt = np.concatenate([shared[: rng.integers(1, 30)], rng.integers(3, VOCAB_SIZE, rng.integers(1, 9))])
        most = int(rng.integers(OUTPUTS // 2, OUTPUTS + 1))
        made.append(Req(name, 0, prompt, SamplingParams(**options), int(rng.integers(2**40)), most))
    return made


def again(reqs: Sequence[Req], seen: Sequence[Seen], seed: int) -> list[Req]:
    """A second turn: each prompt with some of its outputs behind it."""
    rng, made = np.random.default_rng(seed), []
    for req, said in zip(reqs, seen, strict=True):
        told = said.tokens[: rng.integers(len(said.tokens) + 1)]
        prompt = np.concatenate([req.prompt, np.array(told, np.int64)])
        made.append(Req(req.request_id, 0, prompt, req.params, req.seed, 8))
    return made


def same(reqs: Sequence[Req], plain: Sequence[Seen], drafted: Sequence[Seen]) -> None:
    for req, one, other in zip(reqs, plain, drafted, strict=True):
        assert (one.tokens, one.reason) == (other.tokens, other.reason), req.request_id
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)


def compare(
    path: Path, setting: Setting, says: Says, seed: int, depth: Any = None, number: int = 6
) -> tuple[KnowingDrafter, int]:
    """As `compare_model`, of the model in `path`."""
    model = _model(path)
    greedy = model.spec.dtype is torch.float32
    return compare_model(model, setting, says, seed, same, depth, number, greedy=greedy)


def compare_model(
    model: Model,
    setting: Setting,
    says: Says,
    seed: int,
    equal: Callable[[Sequence[Req], Sequence[Seen], Sequence[Seen]], None],
    depth: Any = None,
    number: int = 6,
    *,
    greedy: bool = False,
) -> tuple[KnowingDrafter, int]:
    """Two turns of conversations with drafts in one engine, each answer against an engine that makes none and keeps
    nothing; returns (what drafted, tokens of the second turn that were found in the cache).
    """
    forgetful = Setting(overlap=False, tokens=2048)
    first = lambda: asked(seed, number, greedy=greedy)  # noqa: E731
    plain = Player(forgetful, model, None).play(one := first())
    second = lambda: again(one, plain, seed)  # noqa: E731
    plain_again = Player(forgetful, model, None).play(two := second())
    truth = [
        [*req.prompt.tolist(), *seen.tokens] for req, seen in zip([*one, *two], [*plain, *plain_again], strict=True)
    ]
    drafter = KnowingDrafter(truth, says, VOCAB_SIZE)
    player = Player(setting, model, Speculation(drafter, MOST, depth or FixedDepth(MOST)))
    equal(one, plain, player.play(first(), stop=False))
    equal(two, plain_again, player.play(resumed := second()))
    return drafter, sum(req.cached_tokens for req in resumed)


@pytest.mark.parametrize("kind", RECURRENT_CONFIGS)
def test_no_draft_changes_an_output(kind: str, checkpoint_of: Callable[[str], Path], tmp_path: Path, seed: int) -> None:
    path = make_checkpoint(kind, tmp_path, **LIMITLESS) if kind == ROUNDING else checkpoint_of(kind)
    drafter, found = compare(path, Keeping(slots=64), like_a_coin(seed), seed)
    assert drafter.accepted > 0
    assert found > 0, "the second turn resumes from states of the first"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("says", [always_right, always_wrong, right_then_wrong], ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", QUICK)
def test_whoever_drafts(kind: str, says: Says, overlap: bool, checkpoint_of: Callable[[str], Path], seed: int) -> None:
    drafter, _ = compare(checkpoint_of(kind), Keeping(overlap=overlap), says, seed + 1)
    assert (drafter.accepted > 0) == (says is not always_wrong)


@pytest.mark.parametrize(
    "setting",
    [
        Keeping(page_size=1, interval=1),
        Keeping(page_size=16, chunk=16, interval=16),
        Keeping(chunk=8, rows=8),
        Keeping(slots=5),
        Keeping(tokens=112, rows=6),
        Keeping(tokens=96, rows=6, overlap=False, slots=6),
    ],
    ids=["page 1", "page 16", "small chunks", "few slots", "few pages", "few of both"],
)
@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_whatever_the_pools_are(kind: str, setting: Setting, checkpoint_of: Callable[[str], Path], seed: int) -> None:
    drafter, _ = compare(checkpoint_of(kind), setting, like_a_coin(seed), seed + 2, number=10)
    assert drafter.accepted > 0


@pytest.mark.parametrize("kind", ["jamba", "mamba2"])
def test_the_number_of_drafts_may_change_with_each_step(
    kind: str, checkpoint_of: Callable[[str], Path], seed: int
) -> None:
    drafter, _ = compare(checkpoint_of(kind), Keeping(), always_right, seed + 3, Wavering(seed), number=8)
    assert drafter.accepted > 0
