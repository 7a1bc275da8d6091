"""Decoders that embed positions: what of them is left to transformers, and weights that lie the other way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from core.config import ModelConfig
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model
from core.models.native.matrices import as_linear
from core.models.native.reading import NotDense
from core.models.native.weights import check_dense, decoder_weights
from tests.support.checkpoints import make_checkpoint
from tests.support.native_cases import CASES


def loaded(kind: str, directory: Path, **fields: Any) -> TransformersModel:
    """As transformers computes it."""
    path = make_checkpoint(kind, directory / "model", **CASES[kind] | fields)
    model = load_model(ModelConfig(str(path), native="off"), torch.device("cpu"))
    assert isinstance(model, TransformersModel)
    return model


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms": ("opt", {"do_layer_norm_before": False}, "norms behind what they are added to"),
    "projections": ("opt", {"word_embed_proj_dim": 32}, "projections of its embeddings"),
    "heads": ("gpt_bigcode", {"multi_query": False}, "head by head"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_those_of_another_kind_are_left_to_transformers(name: str, tmp_path: Path) -> None:
    kind, fields, said = OTHERS[name]
    model = loaded(kind, tmp_path, **fields)
    with pytest.raises(NotDense, match=said):
        check_dense(model.module, model.spec)


@pytest.mark.parametrize(("kind", "first"), [("gpt2", 0), ("gpt_bigcode", 0), ("opt", 2)])
def test_the_table_of_positions_is_the_model_s_own(kind: str, first: int, tmp_path: Path) -> None:
    """Not a copy: weights that come while others serve are written into it."""
    model = loaded(kind, tmp_path)
    body: Any = model.module.base_model
    own = (body.decoder.embed_positions if kind == "opt" else body.wpe).weight
    places = decoder_weights(model.module, model.spec).outside.places
    assert places is not None
    assert places.data_ptr() == own[first].data_ptr()
    assert len(places) == 512


def test_a_matrix_that_lies_the_other_way_is_not_copied() -> None:
    module = Conv1D(34, 70)
    linear = as_linear(module)
    assert (linear.in_features, linear.out_features) == (70, 34)
    assert linear.weight.data_ptr() == module.weight.data_ptr()
    x = torch.randn(3, 70)
    torch.testing.assert_close(linear(x), module(x))
