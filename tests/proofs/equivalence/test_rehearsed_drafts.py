"""What drafts is rehearsed too, and leaves nothing: outputs and drafts are those of an engine without rehearsal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.attention.torch_native import TorchNativeAttention
from core.config import EngineConfig, ModelConfig
from core.models.bundled import bundled_model_dir
from core.models.loader import load_model
from core.speculation.drafter import Rehearsing
from core.speculation.eagle_drafter import EagleDrafter
from core.speculation.head_chain import END
from core.speculation.model_drafter import ModelDrafter
from tests.proofs.equivalence.test_eagle import Headed
from tests.proofs.equivalence.test_speculation import MOST, Player, Setting, requests
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.mtp_checkpoints import leave_heads_to_themselves, make_mtp_checkpoint

CPU = torch.device("cpu")
STEPS = [[], [5], [1, 1], [9, 1, 1]]
HEADED = "deepseek_v3"
KINDS = ("greedy", "temperature", "filters")


class Launched(Setting):
    """The draft model runs launch by launch too."""

    def config(self) -> EngineConfig:
        config = Setting.config(self)
        return replace(config, model=replace(config.model, native="off"))


class Rehearsals:
    """Steps that what drafts was given, and what its pool and its columns held right behind the last of them."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: Sequence[Sequence[int]]) -> None:
        self.lens: list[list[int]] = []
        self.left: list[bool] = []
        patch.setattr(TorchNativeAttention, "rehearsals", lambda *_: steps)
        for kind in (ModelDrafter, EagleDrafter):
            assert issubclass(kind, Rehearsing)
            patch.setattr(kind, "rehearse", self._watching(kind.rehearse))

    def _watching(self, usual: Callable[..., None]) -> Callable[..., None]:
        def watched(drafter: Any, forward: Any, relay: Any) -> None:
            usual(drafter, forward, relay)
            self.lens.append(forward.extend_lens_host.tolist() if forward.num_extend else [])
            kv = drafter._pool.kv
            self.left += [bool(kv.k(layer.layer_id)[1:].any()) for layer in kv.layers]
            self.left += [bool(relay.buffer(END).any())] if END in [each.name for each in drafter.columns] else []
            assert any(kv.k(layer.layer_id)[0].any() for layer in kv.layers), "slot 0 is written"

        return watched


@pytest.mark.parametrize("kind", ["draft", "eagle", "mtp-1", "mtp-3"])
def test_what_drafts_is_rehearsed_and_leaves_nothing_behind(
    kind: str,
    tmp_path: Path,
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seed: int,
) -> None:
    monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: FixedDepth(MOST))
    leave_heads_to_themselves(HEADED, monkeypatch)
    paths = {"draft": lambda: checkpoint_of("qwen3"), "eagle": bundled_model_dir}
    path = paths.get(kind, lambda: make_mtp_checkpoint(HEADED, tmp_path, int(kind[-1])))()
    method = {"draft": f"draft:{path}", "eagle": "eagle"}.get(kind, "mtp")
    made = Headed if kind == "eagle" else Launched
    found = []
    for steps in ([], STEPS):
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
            seen = Rehearsals(patch, steps)
            model = load_model(ModelConfig(str(path), native="off", context_length=96), CPU, keeps_modules=True)
            player = Player(made(method=method, overlap=False), model, None)
            assert seen.lens == steps and not any(seen.left)
            found.append((player.play(requests(VOCAB_SIZE, seed, KINDS)), player.drafts.tokens, player.drafts.accepted))
    assert found[0] == found[1] and found[0][1] > 10
    assert "compiled by the first steps" not in caplog.text and f"rehearsed {len(STEPS)} steps" in caplog.text
