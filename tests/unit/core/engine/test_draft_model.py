"""Which models draft for which, and what memory they share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.device.streams import DeviceStreams
from core.engine.build_pools import build_pools
from core.engine.speculation import build_source
from core.errors import StartupError
from core.memory.draft_pool import DraftLayers
from core.models.base import Model
from core.models.loader import load_model
from tests.proofs.equivalence.test_speculation import MOST, Setting
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def target(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("qwen3")


def load(path: Path) -> Model:
    return load_model(ModelConfig(str(path), dtype="float32", native="off", context_length=96), CPU)


def refusal(target: Path, draft: Path) -> str:
    config = Setting(method=f"draft:{draft}").config()
    config = replace(config, model=replace(config.model, path=str(target)))
    with pytest.raises(StartupError) as caught:
        build_source(config, load(target), DeviceStreams(CPU), None)
    return str(caught.value)


def test_a_model_that_cannot_draft_is_refused_by_name(
    target: Path, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    fewer = make_checkpoint("qwen3", tmp_path / "fewer", vocab_size=VOCAB_SIZE - 8)
    assert "312 tokens, and the model 320" in refusal(target, fewer)
    other = make_checkpoint("qwen3", tmp_path / "other")
    words = json.loads((other / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(words))
    assert "the tokenizer of the draft model has other tokens" in refusal(target, other)
    assert "recurrent layers" in refusal(target, checkpoint_of("mamba"))


def test_memory_is_shared_with_the_draft_model(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory decides, both pools and the spare slots fit into what one alone would take."""
    budget = 1 << 18
    monkeypatch.setattr("core.memory.sizing.free_bytes", lambda device, share: budget)
    model = load(target)
    config = Setting(tokens=None).config()
    alone = build_pools(config, model, DeviceStreams(CPU))
    keeps = DraftLayers(model.spec.kv_layers, model.spec.dtype, MOST)
    both = build_pools(config, model, DeviceStreams(CPU), MOST, keeps)
    assert both.drafts is not None
    assert budget * 0.9 < both.kv.nbytes + both.drafts.kv.nbytes <= budget + both.kv.bytes_per_token * 4
    assert both.kv.num_pages < alone.kv.num_pages
    assert int(both.drafts.spare.min()) == both.kv.num_slots, "no page of a row is behind the model's own"
    assert int(both.drafts.spare.max()) < both.drafts.kv.num_slots
