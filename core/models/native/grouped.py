"""Layers that keep four-bit weights in groups, as the matrices that native code multiplies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from core.models.native.parts import Groups, Matrix
from core.models.quantized.grouped import MIDDLE, GroupedWeight

logger = logging.getLogger(__name__)

STEP = 32
"""Inputs of a group are a multiple of this, `kDepth` of `panels.h`, unless there is only one group."""


def fused_groups(linears: Sequence[Any], grouped: Sequence[GroupedWeight | None], bias: torch.Tensor | None) -> Matrix:
    """The rows of all `linears`, one behind the other, with `bias`; float32 where they cannot stay packed."""
    packed = [each for each in grouped if each is not None]
    reason = "some of them are not quantised" if len(packed) < len(grouped) else _parting(packed)
    if reason is not None:
        logger.info(
            "weights of %d outputs are widened for native code: %s", sum(e.out_features for e in linears), reason
        )
        pairs = zip(linears, grouped, strict=True)
        dense = [one.weight.detach().float() if each is None else each.dense(torch.float32) for one, each in pairs]
        return Matrix(torch.cat(dense), None, bias)
    zeros = None if all(each.zero is None for each in packed) else torch.cat([_zero(each) for each in packed])
    groups = Groups(torch.cat([each.scale for each in packed]), zeros, packed[0].size, packed[0].order)
    return Matrix(torch.cat([each.nibbles for each in packed]), None, bias, groups)


def _parting(packed: Sequence[GroupedWeight]) -> str | None:
    """Why these cannot be one matrix of panels, if they cannot."""
    first = packed[0]
    if any(each.size != first.size for each in packed):
        return "their groups have different sizes"
    if first.size % STEP and first.size < first.shape[1]:
        return f"their groups of {first.size} inputs are no multiples of {STEP}"
    if any(not _same(each.order, first.order) for each in packed):
        return "their inputs are in different orders"
    return None


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _zero(weight: GroupedWeight) -> torch.Tensor:
    return torch.full_like(weight.scale, MIDDLE, dtype=torch.int8) if weight.zero is None else weight.zero
