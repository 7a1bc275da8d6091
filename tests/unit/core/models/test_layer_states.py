"""States of chosen layers are those that `transformers` gives for the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.batch.forward_batch import ForwardBatch
from core.config import ModelConfig
from core.models.loader import load_model
from tests.support.fakes.paged_steps import Part
from tests.unit.core.models.reference import PackedRun
from tests.unit.core.models.test_transformers_backend import sequences

CPU = torch.device("cpu")
Make = Callable[[str], Path]


def computed(path: Path, layers: tuple[int, ...]) -> tuple[ForwardBatch, dict[int, list[int]]]:
    """Two prompts in one step."""
    rows = sequences()
    run = PackedRun(load_model(ModelConfig(str(path), dtype="float32", native="off"), CPU), rows)
    batch = run.paged.batch([Part(1, 0, 21), Part(2, 0, 5)], 2, rows[1][:21] + rows[2][:5], [1])
    batch.wants_hidden, batch.wants_layers = True, layers
    run.model.forward(batch)
    return batch, rows


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_they_stand_side_by_side_in_the_order_asked_for(kind: str, checkpoint_of: Make) -> None:
    path = checkpoint_of(kind)
    batch, rows = computed(path, (1, 0, 2))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert batch.layer_states is not None and batch.hidden is not None
    first, zeroth, last = batch.layer_states.chunk(3, -1)
    for start, ids in ((0, rows[1][:21]), (21, rows[2][:5])):
        with torch.inference_mode():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            normed = model.base_model.norm(last)
        part = slice(start, start + len(ids))
        torch.testing.assert_close(zeroth[part], states[0][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(first[part], states[1][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(batch.hidden[part], states[2][0], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(normed[part], states[2][0], atol=1e-3, rtol=1e-3)


def test_a_step_that_wants_none_gets_none(checkpoint_of: Make) -> None:
    assert computed(checkpoint_of("llama"), ())[0].layer_states is None


def test_a_model_says_how_many_there_are(checkpoint_of: Make) -> None:
    for kind, count in (("llama", 2), ("gpt2", 0)):
        config = ModelConfig(str(checkpoint_of(kind)), dtype="float32", native="off")
        assert load_model(config, CPU).spec.state_of_layers == count
