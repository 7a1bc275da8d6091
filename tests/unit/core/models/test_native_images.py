"""Models that see images are computed by compiled code, towers aside, and hold their matrices once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.models.hf.self_check import run_self_check
from core.models.loader import load_model, served_by
from core.models.native.family import UpgradingModel
from core.models.native.images import ImageSteps, text_body
from core.models.native.reading import NotDense
from core.models.native.weights import check_alone
from core.models.vision.tower import towers_of
from tests.support.vision_checkpoints import KINDS, make_vision_checkpoint
from tests.unit.core.models.reference import CPU

pytestmark = pytest.mark.usefixtures("native_code")


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(request.param, tmp_path_factory.mktemp("seeing") / request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_upgraded_and_let_go_of_what_was_packed(checkpoint: Path, dtype: str) -> None:
    model = load_model(ModelConfig(str(checkpoint), dtype=dtype, native="wait"), CPU)
    assert isinstance(model, UpgradingModel)
    assert model.native and served_by(model) == "compiled code"
    images = model._images
    assert images is not None
    tree = images._model
    assert len(text_body(tree).layers), "they compute until the next step"
    reference = load_model(ModelConfig(str(checkpoint), dtype=dtype, native="off"), CPU).reference  # type: ignore[attr-defined]
    assert run_self_check(model, reference).passed
    assert not len(text_body(tree).layers) and tree.get_input_embeddings().weight.numel()
    assert all(tower in tree.modules() for tower in towers_of(tree))
    assert not any("audio" in name for name, _ in tree.named_parameters()), "no request brings sound"


def test_towers_are_what_sees(checkpoint: Path) -> None:
    tree = load_model(ModelConfig(str(checkpoint), native="off"), CPU).module  # type: ignore[attr-defined]
    seeing = {id(each) for tower in towers_of(tree) for each in tower.parameters()}
    reading = {id(each) for each in text_body(tree).parameters()}
    assert seeing and not seeing & reading
    hearing = {id(each) for name, each in tree.named_parameters() if "audio" in name}
    assert bool(hearing) is (checkpoint.name == "gemma4")
    assert seeing | reading | hearing | {id(tree.get_output_embeddings().weight)} == {
        id(each) for each in tree.parameters()
    }


def test_no_more_is_promised_of_their_bits(checkpoint: Path) -> None:
    """Whether an image's tokens get the same ones in any step is not proved."""
    model = load_model(ModelConfig(str(checkpoint), native="wait", deterministic=True), CPU)
    assert isinstance(model, UpgradingModel)
    assert model.native and not model.invariant


def test_a_decoder_of_a_gpu_does_not_take_them(checkpoint: Path) -> None:
    model = load_model(ModelConfig(str(checkpoint), native="off"), CPU)
    with pytest.raises(NotDense, match="it sees images"):
        check_alone(model.module, model.spec)  # type: ignore[attr-defined]


def test_angles_that_layers_put_together_themselves_are_left_to_them(tmp_path: Path) -> None:
    """As `transformers` did up to 5.22, one table for each axis."""
    path = make_vision_checkpoint("qwen2_vl", tmp_path / "seeing")
    model = load_model(ModelConfig(str(path), native="off"), CPU)
    rotary = text_body(model.module).rotary_emb  # type: ignore[attr-defined]
    rotary.recomposition_frequencies = lambda freq: torch.cat((freq, freq), dim=-1)
    with pytest.raises(NotDense, match="three axes"):
        ImageSteps(model.module, model.tower)  # type: ignore[attr-defined]


def test_which_family_serves_a_type_is_known_without_transformers() -> None:
    """Its import takes seconds, and the registry is asked before anything is loaded."""
    code = "import sys, core.models.registry as r; print(r.family_of('gemma3'), 'transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["native", "False"]
