"""Bias by distance: each distance has its own, and from the farthest on all have the last."""

from __future__ import annotations

import torch

from core.attention.relative_bias import RelativeBias


def test_each_distance_has_its_own_up_to_the_farthest() -> None:
    bias = RelativeBias(torch.tensor([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]))
    queries, keys = torch.tensor([5]), torch.tensor([5, 4, 3, 2, 0])
    assert bias(queries, keys)[:, 0].tolist() == [0.0, 10.0, 20.0, 20.0, 20.0]
    assert bias(queries[:, None], keys[None]).shape == (1, 5, 2) and bias.farthest == 2
