"""Random weights are the same in every run, and making them leaves the random numbers of the process alone."""

from __future__ import annotations

import torch

from core.engine.random_model import SPREAD, random_module
from service.bench.gpu import SHAPES

CPU = torch.device("cpu")


def test_weights_depend_on_the_shape_alone_and_nobody_elses_numbers_on_them() -> None:
    made, drawn = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        wanted = torch.rand(3)
        torch.manual_seed(seed)
        made.append(list(random_module(SHAPES["tiny"], torch.float32, CPU).parameters()))
        drawn.append(torch.equal(torch.rand(3), wanted))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
    assert all(drawn), "the process draws what it would have drawn without the model"
    matrices = torch.cat([each.flatten() for each in made[0] if each.dim() > 1])
    assert 0.9 * SPREAD < float(matrices.std()) < 1.1 * SPREAD
