"""Weights rounded to four bits stand for about the floats that they were."""

from __future__ import annotations

import pytest
import torch

from core.models.quantized.rounding import TOP, round_to_groups


@pytest.mark.parametrize("inputs", [128, 256, 200])
def test_what_is_rounded_is_off_by_less_than_a_step(inputs: int) -> None:
    weight = torch.randn(24, inputs, generator=torch.Generator().manual_seed(5))
    found = round_to_groups(weight)
    error = (found.dense(torch.float32) - weight).square().mean().sqrt()
    # 15 steps from the least weight of a group to the greatest: as if all of that range were kept, or better.
    step = float((weight.amax(1) - weight.amin(1)).mean()) / TOP
    assert float(error) < step / 12**0.5 * 1.05
    assert found.shape == (24, inputs)


def test_a_range_is_cut_where_that_makes_the_others_finer() -> None:
    """One weight of a group is far from the others."""
    weight = torch.linspace(-1, 1, 128).repeat(4, 1)
    weight[:, 7] = 2.0
    error = (round_to_groups(weight).dense(torch.float32) - weight).square().sum(1)
    step = 3.0 / TOP
    assert bool((error < 128 * step**2 / 12).all())


def test_nothing_stays_nothing() -> None:
    assert not round_to_groups(torch.zeros(2, 128)).dense(torch.float32).any()
