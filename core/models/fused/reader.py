"""How the parts of a decoder for a GPU are taken off modules: matrices side by side, norms that know how they round.

No weight is held twice. What becomes part of a longer matrix is from then on a view of it in its module too, so the
module tree computes what it did, and adapters and heads that hook it find what they look for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from core.models.native.matrices import PLAIN, Reader
from core.models.native.parts import Matrix, Norm
from core.models.native.reading import NotDense, plain_norm, read_norm


def reader_for(dtype: torch.dtype) -> Reader:
    """For a model of `dtype`, on whichever device it is. What it takes may raise NotDense."""
    return Reader(joined, partial(rounded_norm, dtype), sorts=False, tables=dtype)


def check_plain(linears: Sequence[Any]) -> None:
    """Raises NotDense unless each of `linears` has a floating-point matrix of its own."""
    for linear in linears:
        if type(getattr(linear, "weight", None)) not in PLAIN or not linear.weight.dtype.is_floating_point:
            raise NotDense("its weights are quantised")


def joined(linears: Sequence[Any]) -> Matrix:
    """One matrix of the rows of `linears`, whose weights become views of it; its bias is of the same dtype."""
    check_plain(linears)
    if len(linears) == 1:
        (linear,) = linears
        return Matrix(linear.weight.detach(), None, None if linear.bias is None else linear.bias.detach())
    weight = torch.cat([linear.weight.detach() for linear in linears])
    sizes = [len(linear.weight) for linear in linears]
    for linear, part in zip(linears, weight.split(sizes), strict=True):
        linear.weight.data = part
    bias = None
    if any(linear.bias is not None for linear in linears):
        parts = [
            weight.new_zeros(n) if each.bias is None else each.bias for each, n in zip(linears, sizes, strict=True)
        ]
        bias = torch.cat([part.detach() for part in parts])
    return Matrix(weight, None, bias)


@torch.inference_mode()
def rounded_norm(dtype: torch.dtype, module: Any, width: int | None = None) -> Norm:
    """What `module` computes. Its weight is of `dtype` if rows are rounded to that before it, else float32.

    Which of both is tried: Llama's norms round, Gemma's and layer norms do not. Raises NotDense.
    """
    norm = read_norm(module, width)
    narrow = norm.weight.to(dtype)
    exact = torch.equal(narrow.float(), norm.weight)
    if dtype is torch.float32 or norm.centred or norm.bias is not None or not exact or len(narrow) != norm.width:
        return norm
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, norm.width, generator=generator).to(norm.weight.device, dtype)
    got, once = module(x).float(), plain_norm(norm, x).to(dtype).float()
    before = plain_norm(norm._replace(weight=torch.ones_like(norm.weight)), x).to(dtype)
    twice = (before * narrow).float()
    return norm._replace(weight=narrow) if (got - twice).abs().sum() < (got - once).abs().sum() else norm
