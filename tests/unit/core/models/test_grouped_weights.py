"""Four-bit weights in groups where layers and tensors differ: zeros that only some have, and those of torchao."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core.models.native.grouped import fused_groups
from core.models.quantized.grouped import GroupedWeight, pack_nibbles
from core.models.quantized.torchao_int4 import keep_int4

OUTPUTS, INPUTS, SIZE = 8, 64, 32


def a_weight(seed: int, has_zeros: bool) -> GroupedWeight:
    draw = torch.Generator().manual_seed(seed)
    nibbles = torch.randint(0, 16, (OUTPUTS, INPUTS), generator=draw, dtype=torch.int8)
    scale = torch.rand(OUTPUTS, INPUTS // SIZE, generator=draw) + 0.5
    zero = torch.randint(0, 16, scale.shape, generator=draw, dtype=torch.int8) if has_zeros else None
    return GroupedWeight(pack_nibbles(nibbles), scale, zero, SIZE)


def test_layers_with_and_without_zeros_are_one_matrix() -> None:
    weights = [a_weight(1, True), a_weight(2, False)]
    matrix = fused_groups([nn.Linear(INPUTS, OUTPUTS) for _ in weights], weights, None)
    groups = matrix.groups
    assert groups is not None, "both stay packed"
    fused = GroupedWeight(matrix.weight, groups.scale, groups.zero, groups.size)
    assert torch.equal(fused.dense(torch.float32), torch.cat([each.dense(torch.float32) for each in weights]))


def test_zeros_of_torchao_are_counted_from_the_lowest_number() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False))
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    with torch.no_grad():
        linear.weight.add_(0.3)  # so that no zero is in the middle
    kind = IntxWeightOnlyConfig(torch.int4, PerGroup(SIZE), mapping_type=MappingType.ASYMMETRIC)  # type: ignore[attr-defined]
    quantize_(model, kind)
    held: object = linear.weight
    want = held.dequantize()  # type: ignore[attr-defined]
    assert held.zero_point.any()  # type: ignore[attr-defined]
    keep_int4(model, "packed")
    got = model(torch.eye(INPUTS)).T
    torch.testing.assert_close(got, want.float(), atol=1e-6, rtol=1e-6)
