"""How far back a logit depends on its tokens, by the layers of the model."""

from __future__ import annotations

import dataclasses

import torch

from core.memory.kv_pool import KVLayerSpec
from core.memory.recurrent.state_pool import StateLayerSpec
from core.models.base import ModelSpec


def spec(*windows: int | None) -> ModelSpec:
    layers = tuple(KVLayerSpec(place, 2, 8, 8, window=window) for place, window in enumerate(windows))
    return ModelSpec("m", "M", 32, 64, torch.float32, layers)


def test_windows_of_layers_add_up() -> None:
    assert spec(8, 8, 16).reach == 32 and spec(8).reach == 8


def test_one_layer_that_sees_everything_or_keeps_a_state_makes_it_all_tokens() -> None:
    assert spec(8, None, 8).reach is None and spec(None).reach is None
    assert dataclasses.replace(spec(8, 8), state_layers=(StateLayerSpec(2, (), ()),)).reach is None
