"""How much a token is multiplied by, which says how many of them make a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import ModelConfig
from core.models.encoder_only.reference import LENGTHS, counted_in
from core.models.loader import load_model
from tests.support.encoders import ENCODERS, make_encoder

KINDS = ("albert", "bert", "distilbert", "electra", "modernbert", "mobilebert", "ibert")
INTO = ("embedding_hidden_mapping_in", "embedding_transformation", "embeddings_project")
"""Matrices from embeddings to states of another width."""


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_count_as_often_as_tokens_go_through_them(kind: str, tmp_path: Path) -> None:
    """ALBERT's layers share theirs; embeddings and poolers are no such matrices."""
    model: Any = load_model(ModelConfig(str(make_encoder(kind, tmp_path)), native="off"), torch.device("cpu"))
    layers = [module for name, module in model.module.named_modules() if name.endswith(("layer.0", "layers.0"))]
    within = next(module for module in layers if not isinstance(module, torch.nn.ModuleList))
    each = sum(part.weight.numel() for part in within.modules() if getattr(part, "weight", torch.empty(0)).dim() == 2)
    assert each > 4 * 64 * 64 or kind == "mobilebert"
    into = [module for name, module in model.module.named_modules() if name.endswith(INTO)]
    count = model.module.config.num_hidden_layers
    assert model.spec.multiplied == count * each + sum(module.weight.numel() for module in into)
    assert not any(each._forward_hooks for each in model.module.modules()), "counting is over"
    assert set(KINDS) <= set(ENCODERS)


def test_modules_without_a_matrix_count_nothing() -> None:
    """A norm may have no weight."""

    class Base(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = torch.nn.Linear(8, 4), torch.nn.LayerNorm(4, elementwise_affine=False)

    base: Any = Base()
    with counted_in(base) as counted:
        base.norm(base.dense(torch.zeros(1, LENGTHS[0], 8)))
        base.dense(torch.zeros(1, 1, 8))
    assert counted == [32], "of all tokens"
