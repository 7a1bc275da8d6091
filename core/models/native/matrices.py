"""Products of linear layers as one matrix each, taken off their modules, and which modules can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from core.models.native.declaration import Family, part_of
from core.models.native.grouped import fused_groups
from core.models.native.parts import HeadShape, Matrix, Norm
from core.models.native.reading import NotDense, read_norm
from core.models.native.recurrences import reordered, scaled
from core.models.quantized.grouped import grouped_weight

PLAIN = (torch.Tensor, nn.Parameter)


def one_behind_the_other(linears: Sequence[Any]) -> Matrix:
    """One matrix of the rows of `linears`, its bias float32. Raises NotDense."""
    bias = None
    if any(linear.bias is not None for linear in linears):
        zeros = (torch.zeros(linear.out_features) for linear in linears)
        bias = torch.cat(
            [z if each.bias is None else each.bias.detach().float() for z, each in zip(zeros, linears, strict=True)]
        )
    grouped = [grouped_weight(linear) for linear in linears]
    if any(each is not None for each in grouped):
        return fused_groups(linears, grouped, bias)
    weights: list[Any] = [linear.weight.detach() for linear in linears]
    scaled = {type(weight) not in PLAIN for weight in weights}
    if scaled == {False}:
        return Matrix(weights[0] if len(weights) == 1 else torch.cat(weights), None, bias)
    if scaled != {True}:
        raise NotDense("some of the matrices that it would multiply as one are int8 and some are not")
    scale = torch.cat([weight.scale.reshape(-1).float() for weight in weights])
    return Matrix(torch.cat([weight.qdata for weight in weights]), scale, bias)


@dataclass(frozen=True, slots=True)
class Reader:
    """How parts are taken off modules, for a decoder that computes them on the CPU unless it says otherwise."""

    matrix: Callable[[Sequence[Any]], Matrix] = one_behind_the_other
    """Linear layers as one product."""
    norm: Callable[[Any, int | None], Norm] = read_norm
    sorts: bool = True
    """Whether the rows of queries, keys and values are sorted by kind where the module has them otherwise."""
    tables: torch.dtype = torch.float32
    """What rotary embeddings are asked for: most give what they are given states in."""

    def norm_of(self, module: Any, name: str | tuple[str, ...], width: int | None = None) -> Norm | None:
        """What `module` calls `name`, or the first of these that it has; None if that changes nothing."""
        names = (name,) if isinstance(name, str) else name
        found = next((part for each in names if (part := part_of(module, each)) is not None), None)
        return None if found is None or isinstance(found, nn.Identity) else self.norm(found, width)


def fused_product(
    reader: Reader, family: Family, config: Any, module: Any, names: Sequence[str], given: float = 1.0
) -> Matrix:
    """Those of `names` as one, with what the family multiplies their outputs by, and their inputs by `given`."""
    linears = [linear_of(module, name) for name in names]
    factors = [float(family.factors[name](config)) if name in family.factors else 1.0 for name in names]
    if {given, *factors} == {1.0}:
        return reader.matrix(linears)
    sizes = torch.tensor([linear.out_features for linear in linears])
    by_output = torch.tensor(factors).repeat_interleave(sizes)
    return scaled(reader.matrix(linears), by_output * given, by_output)


def as_linear(module: Any) -> Any:
    """`module`, or the linear layer that it is: GPT-2's `Conv1D` has its weight [K, N]. Weights are shared."""
    if type(module) is not Conv1D:
        return module
    linear = nn.Linear(module.nx, module.nf, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().t(), requires_grad=False)
    linear.bias = module.bias
    return linear


def linear_of(module: Any, name: str) -> Any:
    """`as_linear` of what `module` calls `name`."""
    return as_linear(getattr(module, name))


def sorted_by_kind(fused: Matrix, family: Family, shape: HeadShape) -> Matrix:
    """Rows of all queries, all keys, all values, and of all gates where each head's query has one behind it."""
    rows, queries = torch.arange(len(fused.weight)), shape.heads * shape.head_dim
    if family.by_head:
        shared = shape.heads // shape.kv_heads
        by_head = rows.view(shape.kv_heads, shared + 2, shape.head_dim)
        parts = by_head[:, :shared], by_head[:, shared], by_head[:, shared + 1]
        return reordered(fused, torch.cat([part.reshape(-1) for part in parts]))
    if family.shards:
        query, value, key = rows.view(family.shards, 3, -1).unbind(1)
        return reordered(fused, torch.cat([query.reshape(-1), key.reshape(-1), value.reshape(-1)]))
    if len(family.qkv) > 3 or len(rows) != 2 * (queries + shape.kv_heads * shape.head_dim):
        return fused
    query, gate = rows[: 2 * queries].view(shape.heads, 2, shape.head_dim).unbind(1)
    return reordered(fused, torch.cat([query.reshape(-1), rows[2 * queries :], gate.reshape(-1)]))


def vector(linear: Any, dtype: torch.dtype) -> torch.Tensor:
    """[C]: the only row of a product without a bias."""
    if (grouped := grouped_weight(linear)) is not None:
        return grouped.dense(dtype).reshape(-1)
    weight = linear.weight.detach()
    found: torch.Tensor = weight if type(weight) in PLAIN else weight.dequantize()
    return found.reshape(-1)


def is_dense(module: Any, dtype: torch.dtype) -> bool:
    """Whether `module` is a linear layer with a weight of `dtype`, or one that native code has a product for."""
    # compressed-tensors leaves the class alone, takes the weight away or keeps it as int8, and scales elsewhere.
    if type(module) is not nn.Linear or getattr(module, "quantization_scheme", None) is not None:
        return False
    if grouped_weight(module) is not None:
        return True
    weight = module.weight
    if tuple(weight.shape) != (module.out_features, module.in_features):
        return False  # It is kept elsewhere, in another form.
    return is_scaled_int8(weight) or (type(weight) in PLAIN and weight.dtype == dtype)


def is_scaled_int8(weight: Any) -> bool:
    """Whether it is torchao's int8 of weights only, symmetric, with one scale per output."""
    if type(weight).__name__ != "Int8Tensor":
        return False
    if weight.qdata.dim() != 2 or weight.scale.numel() != weight.shape[0]:
        return False
    if weight.act_quant_kwargs is not None or weight.act_quant_scale is not None or weight.act_pre_scale is not None:
        return False
    return weight.zero_point is None or not bool(weight.zero_point.any())
