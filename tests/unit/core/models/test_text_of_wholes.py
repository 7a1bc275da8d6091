"""Checkpoints that also see, of types whose images are not taken: their text is served, by compiled code."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import ModelConfig
from core.models.config import read_checkpoint_config
from core.models.fused.decoder import check_fusible
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model
from core.models.native.family import UpgradingModel
from core.models.registry import family_of
from tests.support.checkpoints import make_checkpoint
from tests.support.native_cases import HEADS, LLAMA4
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel
from tests.unit.core.models.test_transformers_backend import sequences, worst_error

pytestmark = pytest.mark.usefixtures("native_code")

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
WHOLES: dict[str, tuple[str, dict[str, Any]]] = {
    "janus": ("llama", TOWER | {"patch_size": 14}),
    "vipllava": ("llama", TOWER | {"model_type": "clip_vision_model", "patch_size": 14, "projection_dim": 32}),
    "idefics2": ("llama", TOWER | {"patch_size": 14}),
}
"""Type of the whole -> type of what reads tokens, and what sees."""


@pytest.fixture(scope="module", params=WHOLES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text, seeing = WHOLES[request.param]
    parts = {"text_config": HEADS | {"model_type": text}, "vision_config": seeing}
    return make_checkpoint(request.param, tmp_path_factory.mktemp("whole") / request.param, **parts)


def test_logits_of_texts_are_those_of_the_whole(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = load_model(ModelConfig(str(whole), dtype="float32", native="wait"), CPU)
    assert f"images of {whole.name!r} are not taken" in caplog.text
    assert isinstance(model, UpgradingModel) and model.native and model.spec.vision is None
    plain, rows = PlainModel(whole), sequences()
    worst, same = worst_error(PackedRun(model, rows), {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 1e-4 and same


def test_the_type_of_the_text_says_what_serves(whole: Path) -> None:
    """A type that is declared itself goes before that of its text."""
    read = read_checkpoint_config(whole)
    assert (read.model_type, read.text_type) == (whole.name, WHOLES[whole.name][0])
    assert family_of(read.model_type, read.text_type) == "native"
    assert family_of("janus", "clip_text_model") == family_of("janus") == "transformers"
    assert family_of("gemma3", "clip_text_model") == "native"


def test_what_sees_is_left_out_where_a_class_reads_texts_alone(tmp_path: Path) -> None:
    """Llama 4 has one, which knows no weights of a tower."""
    path = make_checkpoint("llama4_text", tmp_path / "text", **HEADS | LLAMA4)
    whole = Path(shutil.copytree(path, tmp_path / "whole"))
    text = json.loads((path / "config.json").read_text())
    names = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}
    (whole / "config.json").write_text(json.dumps({**names, "text_config": text, "vision_config": TOWER}))
    weights = load_file(path / "model.safetensors")
    more = {f"{name}.linear.weight": torch.ones(2, 2) for name in ("multi_modal_projector", "vision_model")}
    save_file({**weights, **more}, whole / "model.safetensors", {"format": "pt"})
    assert said(path) == said(whole)


def test_a_type_that_sees_may_come_without_its_tower(tmp_path: Path) -> None:
    """Qwen3.5, saved as the class that reads texts alone."""
    path = make_checkpoint("qwen3_5_text", tmp_path / "text", **HEADS | DELTA)
    whole = Path(shutil.copytree(path, tmp_path / "whole"))
    text = json.loads((path / "config.json").read_text())
    names = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"]}
    (whole / "config.json").write_text(json.dumps({**names, "text_config": text, "vision_config": {"depth": 1}}))
    assert said(path) == said(whole)


def said(path: Path) -> tuple[float, bool]:
    """How far its logits are from nothing; computed by compiled code, and without eyes."""
    model = load_model(ModelConfig(str(path), dtype="float32", native="wait"), CPU)
    assert isinstance(model, UpgradingModel) and model.native and model.spec.vision is None
    nothing = {row: torch.zeros(len(ids), 320) for row, ids in sequences().items()}
    return worst_error(PackedRun(model, sequences()), nothing)


def test_a_gpu_computes_their_text_as_that_of_others(whole: Path) -> None:
    model = load_model(ModelConfig(str(whole), dtype="float32", native="off"), CPU)
    assert isinstance(model, TransformersModel)
    check_fusible(model.module, model.spec)
