"""What modules of the lowest release of transformers that is allowed have otherwise, on modules of the one at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from core.memory.recurrent.state_pool import StateLayerSpec, StateShape
from core.models.hf.recurrent import StateView
from core.models.native.mixtures import read_router
from core.models.native.parts import Mamba2, Matrix
from core.models.native.reading import NotDense, RotaryTables
from core.models.native.recurrences import read_recurrence
from core.models.products.packing import matrices_of
from tests.unit.core.models.reference import load

HIDDEN, EXPERTS = 24, 6


def test_mixers_take_states_from_layers_of_the_cache() -> None:
    view = StateView(torch.zeros(2, 3, 4), torch.ones(2, 5))
    layer = view.layers[7]
    assert layer.conv_states[0] is view.conv and layer.recurrent_states[0] is view.recurrent
    assert not layer.record_past


class Routed(nn.Module):
    """The router of Granite's mixtures, whose results come in the order of 5.17 or of 5.23."""

    top_k = 2

    def __init__(self, experts_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)))
        self.experts_first = experts_first

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = nn.functional.linear(x, self.weight)
        chosen = logits.topk(self.top_k)
        found = (logits, chosen.values.softmax(-1), chosen.indices)
        return found[::-1] if self.experts_first else found


@pytest.mark.parametrize("experts_first", [True, False])
def test_a_router_may_give_the_experts_first(experts_first: bool) -> None:
    module = Routed(experts_first)
    found = read_router(module, Matrix(module.weight.detach(), None, None), torch.float32, None)
    assert (found.scoring, found.top_k, found.renormalises) == ("softmax", 2, True)


def test_a_router_that_leaves_the_choice_to_others_is_named() -> None:
    module = nn.Linear(HIDDEN, EXPERTS, bias=False)
    with pytest.raises(NotDense, match="its Linear leaves the choice of experts"):
        read_router(module, Matrix(module.weight.detach(), None, None), torch.float32, None)


def fused(module: Any, names: Sequence[str]) -> Matrix:
    return Matrix(torch.cat([getattr(module, name).weight.detach() for name in names]), None, None)


@pytest.mark.parametrize("grouped", [True, False])
def test_a_gated_norm_takes_all_elements_as_one_unless_it_says_how_many(grouped: bool) -> None:
    sizes = {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2}
    mixer = Mamba2Mixer(Mamba2Config(**sizes, use_bias=False), 0)
    if not grouped and hasattr(mixer.norm, "group_size"):
        del mixer.norm.group_size
    elif grouped:
        mixer.norm.group_size = 64
    state = StateLayerSpec(0, StateShape((192, 4), torch.float32), StateShape((4, 32, 16), torch.float32))
    found = read_recurrence(mixer, state, fused)
    assert isinstance(found, Mamba2) and found.norm is not None
    assert found.norm.width == (64 if grouped else 128)


class ByAxes(nn.Module):
    """Turns by places on three axes, and takes no others."""

    mrope_section = (2, 1, 1)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert position_ids.dim() == 3 and position_ids.shape[:2] == (3, 1)
        length = position_ids.shape[2]
        angles = position_ids[0, :, :, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
        angles = torch.cat([angles, angles], -1)
        assert angles.shape == (1, length, 8)
        return angles.cos(), angles.sin()


def test_places_on_three_axes_are_alike_for_text() -> None:
    rotary = RotaryTables(ByAxes(), 5, False).of("full_attention")
    assert torch.equal(rotary.sin[:, 0], torch.arange(5).float().sin()) and rotary.cos.shape == (5, 4)


def test_experts_need_not_say_whether_they_are_parallel(checkpoint: Callable[[str], Path]) -> None:
    module = load(checkpoint("qwen3_moe")).module
    for experts in (each for each in module.modules() if hasattr(each, "gate_up_proj")):
        for name in ("_is_expert_parallel", "has_post_expert_norm"):
            vars(experts).pop(name, None)
    found = [name for name in matrices_of(module) if name.endswith("experts")]
    assert len(found) == 2
