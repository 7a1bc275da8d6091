"""Rows of a matrix in another order, whatever it is kept as; norms that do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.models.native.parts import Groups, Matrix
from core.models.native.recurrences import reordered
from tests.support.checkpoints import make_checkpoint
from tests.support.native_cases import CASES
from tests.unit.core.models.test_native_shapes import logits

OUTPUTS, INPUTS, SIZE = 6, 32, 8


def drawn(kind: str) -> Matrix:
    rng = torch.Generator().manual_seed(5)
    bias = torch.randn(OUTPUTS, generator=rng)
    if kind == "dense":
        return Matrix(torch.randn(OUTPUTS, INPUTS, generator=rng), None, bias)
    if kind == "int8":
        weight = torch.randint(-127, 128, (OUTPUTS, INPUTS), generator=rng, dtype=torch.int8)
        return Matrix(weight, torch.rand(OUTPUTS, generator=rng), None)
    weight = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), generator=rng, dtype=torch.uint8)
    scale = torch.rand(OUTPUTS, INPUTS // SIZE, generator=rng)
    zero = torch.randint(0, 16, scale.shape, generator=rng, dtype=torch.int8) if kind == "int4" else None
    return Matrix(weight, None, bias, Groups(scale, zero, SIZE, None))


def dense(matrix: Matrix) -> torch.Tensor:
    """float32[N, K]: what it stands for."""
    if (groups := matrix.groups) is None:
        return matrix.weight.float() * (1.0 if matrix.scale is None else matrix.scale[:, None])
    nibbles = torch.stack((matrix.weight & 15, matrix.weight >> 4), -1).flatten(1).float()
    zero = torch.full_like(groups.scale, 8.0) if groups.zero is None else groups.zero.float()
    by_group = nibbles.view(len(nibbles), -1, groups.size)
    return ((by_group - zero[..., None]) * groups.scale[..., None]).flatten(1)


@pytest.mark.parametrize("kind", ["dense", "int8", "int4", "int4, symmetric"])
def test_what_belongs_to_a_row_goes_with_it(kind: str) -> None:
    matrix, rows = drawn(kind), torch.tensor([3, 0, 5, 1])
    moved = reordered(matrix, rows)
    assert torch.equal(dense(moved), dense(matrix)[rows])
    if matrix.bias is not None:
        assert moved.bias is not None and torch.equal(moved.bias, matrix.bias[rows])


@pytest.mark.usefixtures("native_code")
def test_a_norm_that_does_nothing_is_left_out(tmp_path: Path) -> None:
    path = make_checkpoint("hyperclovax", tmp_path / "model", **CASES["hyperclovax"] | {"use_post_norm": False})
    for got, want in zip(logits(path, 2), logits(path, 1, native="off"), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
