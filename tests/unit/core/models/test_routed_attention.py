"""Attention that transformers computes in place, led to the interface: what it takes over, and how far it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.falcon.modeling_falcon import FalconLinear

from core.config import ModelConfig
from core.models.hf.backend import TransformersModel
from core.models.hf.routed_attention import plain_linears, route_attention, slopes_of
from core.models.loader import load_model
from tests.support.checkpoints import make_checkpoint
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel
from tests.unit.core.models.test_transformers_backend import sequences, worst_error


def load(path: Path, **options: Any) -> TransformersModel:
    model = load_model(ModelConfig(str(path), dtype="float32", native="off", **options), CPU)
    assert isinstance(model, TransformersModel)
    return model


def test_clipped_projections_are_those_of_transformers(tmp_path: Path) -> None:
    path = make_checkpoint("mpt", tmp_path, attn_config={"clip_qkv": 0.6})
    rows, plain = sequences(), PlainModel(path)
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    worst, same = worst_error(PackedRun(load(path), rows), expected)
    assert worst < 1e-4 and same


def test_slopes_are_those_of_the_paper(tmp_path: Path) -> None:
    """Of a power of two of heads; 2108.12409, section 3."""
    path = make_checkpoint("bloom", tmp_path, hidden_size=64, n_head=8)
    module: Any = load(path).module
    slopes = [slopes_of(layer.self_attention) for layer in module.transformer.h]
    assert all(torch.equal(found, 2.0 ** -torch.arange(1.0, 9.0)) for found in slopes if found is not None)
    assert None not in slopes


def test_all_layers_share_one_table_of_distances(tmp_path: Path) -> None:
    module: Any = load(make_checkpoint("mpt", tmp_path, max_seq_len=96)).module
    tables = {id(block.attn.slipstream_bias) for block in module.transformer.blocks}
    (table,) = {block.attn.slipstream_bias for block in module.transformer.blocks}
    assert len(tables) == 1 and table.table.shape == (96, 4)


def test_a_model_that_needs_it_not_is_left_alone(tmp_path: Path) -> None:
    module = load(make_checkpoint("llama", tmp_path)).module
    before = [type(each) for each in module.modules()]
    route_attention(module, 64)
    plain_linears(module)
    assert [type(each) for each in module.modules()] == before


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_linear_layers_of_a_class_of_their_own_are_quantised(quantization: str, tmp_path: Path) -> None:
    model = load(make_checkpoint("falcon", tmp_path), quantization=quantization)
    assert model.spec.quantization
    assert not [each for each in model.module.modules() if isinstance(each, FalconLinear)]
