"""Heads for multi-token prediction: they change no output, and say what `transformers` says with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.spec_plan import Aim
from core.config import ModelConfig
from core.device.streams import DeviceStreams
from core.engine.speculation import build_source
from core.errors import StartupError
from core.models.base import Model
from core.models.hf import backend
from core.models.hf.mtp import load_mtp
from core.models.loader import load_model
from core.speculation.drafter import Drafts, Ran
from core.speculation.eagle_drafter import EagleDrafter
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_speculation import MOST, Player, Setting, requests
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.mtp_checkpoints import leave_heads_to_themselves, make_mtp_checkpoint, plain_model

CPU = torch.device("cpu")
KINDS = ("deepseek_v3", "glm4_moe")
LOAD_WEIGHTS = backend.load_module
FEW = 24
"""Tokens of a vocabulary from which an untrained head is right now and then."""


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: FixedDepth(MOST))
    for kind in KINDS:
        leave_heads_to_themselves(kind, monkeypatch)


def load(path: Path) -> Model:
    return load_model(ModelConfig(str(path), dtype="float32", context_length=96), CPU, keeps_modules=True)


@pytest.mark.parametrize("setting", [{}, {"overlap": False, "page_size": 1, "chunk": 16}], ids=["overlap", "short"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_draft_of_a_head_changes_an_output(
    kind: str, setting: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In float64, as for other models by `transformers`: sums in another order move no draw over a border."""
    path = make_mtp_checkpoint(kind, tmp_path / kind, vocab_size=FEW)
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: torch.float64)
    monkeypatch.setattr("core.models.hf.backend.load_module", with_plain_experts)
    reqs = lambda: [req for req in requests(FEW, seed) if not outside(req)]  # noqa: E731
    plain = Player(Setting(**setting), load(path), None).play(reqs())
    player = Player(Setting(**setting, method="mtp"), load(path), None)
    for req, one, other in zip(reqs(), plain, player.play(reqs()), strict=True):
        assert one.tokens == other.tokens and one.reason == other.reason, req.request_id
    assert player.drafts.accepted > 0


def with_plain_experts(*given: Any, **named: Any) -> Any:
    """As the backend loads weights; the usual kernel for experts has no float64."""
    model: Any = LOAD_WEIGHTS(*given, **named)
    model.set_experts_implementation("eager")
    return model


def outside(req: Req) -> bool:
    """Whether it names a token that is not among the few."""
    return max([0, *req.params.stop_token_ids, *req.params.logit_bias]) >= FEW


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_says_what_transformers_says_with_it(
    kind: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """`generate(use_mtp=True)` has one draft a step; behind prompts of one and of several chunks ours are the same."""
    path = make_mtp_checkpoint(kind, tmp_path / kind)
    prompt = np.random.default_rng(seed).integers(3, VOCAB_SIZE, 37)
    said: dict[int, int] = {}
    draft = EagleDrafter.draft

    def noting(drafter: EagleDrafter, ran: Ran, aim: Aim) -> Drafts:
        drafts = draft(drafter, ran, aim)
        said.update(zip((ran.lens + 1).tolist(), drafts.ids[:, 0].tolist(), strict=True) if drafts.ids.size else ())
        return drafts

    monkeypatch.setattr(EagleDrafter, "draft", noting)
    player = Player(Setting(method="mtp", overlap=False, chunk=chunk), load(path), None)
    (seen,) = player.play([Req("r", 0, prompt, SamplingParams(temperature=0.0, ignore_eos=True), 1, 20)])
    tokens, expected = by_transformers(path, prompt, 20)
    assert seen.tokens == tokens
    common = [length for length in expected if length in said]
    assert len(common) > 10 and common[0] == len(prompt) + 1
    assert [said[length] for length in common] == [expected[length] for length in common]


def by_transformers(path: Path, prompt: np.ndarray, most: int) -> tuple[list[int], dict[int, int]]:
    """(output of `generate`, the draft of its head by how many tokens were known)."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    drafts: dict[int, int] = {}
    get = MTPCandidateGenerator.get_candidates

    def noting(self: Any, input_ids: torch.Tensor, *given: Any, **named: Any) -> Any:
        found = get(self, input_ids, *given, **named)
        known = input_ids.shape[1]
        if found[0].shape[1] > known:
            drafts[known] = int(found[0][0, known])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", noting)
        out = plain_model(path).generate(
            torch.from_numpy(prompt)[None], use_mtp=True, max_new_tokens=most, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist(), drafts


def test_a_head_keeps_latents_where_its_model_does(tmp_path: Path) -> None:
    model = load(make_mtp_checkpoint("deepseek_v3", tmp_path / "deepseek_v3"))
    (layer,) = load_mtp(model, MOST).layers
    assert layer.v_in_k and layer == model.spec.kv_layers[0]


def refusal(path: Path) -> str:
    config = Setting(method="mtp").config()
    config = replace(config, model=replace(config.model, path=str(path)))
    with pytest.raises(StartupError, match="speculative=mtp is not possible: ") as caught:
        build_source(config, load(path), DeviceStreams(CPU), None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen3_next", "transformers ignores the mtp.* weights of model type 'qwen3_next'"),
        ("qwen3_moe", "'qwen3_moe' has no heads for multi-token prediction"),
        ("llama", "'llama' has no heads for multi-token prediction"),
        ("deepseek_v3", "cannot be loaded"),
    ],
)
def test_a_model_without_a_head_is_refused_by_name(
    kind: str, reason: str, checkpoint_of: Callable[[str], Path]
) -> None:
    """The last one names a head in its configuration, and has no weights of it."""
    assert reason in refusal(checkpoint_of(kind))
