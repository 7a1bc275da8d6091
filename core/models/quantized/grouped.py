"""Four-bit weights in groups of inputs, whatever file they came from: what native code packs and transformers widens.

A weight is (q - zero) scale, with q in 0..15 and a scale and a zero for each output and group. A linear layer keeps
these instead of its matrix; its class stays, so that adapters find it. transformers widens the matrix for each call;
native code (`core/models/native/nibbles.h`) never does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

NIBBLES, SCALE, ZERO, ORDER = "weight_nibbles", "weight_scale", "weight_zero", "weight_order"
"""Names of the buffers of a layer that keeps its weight in groups."""
MIDDLE = 8
"""The zero of weights that have none of their own."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix of N outputs by K inputs, K even."""

    nibbles: torch.Tensor
    """uint8[N, K / 2], the even one of two inputs in the low bits; inputs in `order`."""
    scale: torch.Tensor
    """Of a float type, [N, groups]."""
    zero: torch.Tensor | None
    """[N, groups]: int8, or float where it is no whole number; None: 8 everywhere."""
    size: int
    """Inputs of a group; the last group may have fewer."""
    order: torch.Tensor | None = None
    """int64[K], which input is where, if they were sorted into groups; None: as they come."""

    def __post_init__(self) -> None:
        outputs, inputs = self.shape
        groups = (outputs, -(-inputs // self.size))
        assert self.nibbles.dtype == torch.uint8, self.nibbles.dtype
        assert tuple(self.scale.shape) == groups, (self.scale.shape, groups)
        assert self.zero is None or tuple(self.zero.shape) == groups, (self.zero.shape, groups)
        assert self.order is None or tuple(self.order.shape) == (inputs,), (self.order.shape, inputs)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return int(self.nibbles.shape[0]), 2 * int(self.nibbles.shape[1])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] of `dtype`, computed in float32."""
        outputs, inputs = self.shape
        size = min(self.size, inputs)
        whole = self.scale.shape[1] * size
        filled = torch.nn.functional.pad(self.nibbles, (0, (whole - inputs + 1) // 2))
        values = torch.empty(*filled.shape, 2, dtype=torch.float32, device=filled.device)
        values[..., 0], values[..., 1] = filled & 15, filled >> 4
        groups = values.view(outputs, -1)[:, :whole].view(outputs, -1, size)
        groups -= float(MIDDLE) if self.zero is None else self.zero.float()[..., None]
        groups *= self.scale.float()[..., None]
        values = groups.reshape(outputs, whole)[:, :inputs]
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        return values.to(dtype)


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """uint8[N, K / 2] from integers 0..15 [N, K], K even."""
    narrow = values.to(torch.uint8)
    return (narrow[:, ::2] | narrow[:, 1::2] << 4).contiguous()


def keep_grouped(linear: torch.nn.Linear, weight: GroupedWeight) -> None:
    """Have `linear` keep `weight` instead of a matrix, and compute with it."""
    assert weight.shape == (linear.out_features, linear.in_features), (weight.shape, linear)
    matrix = linear._parameters.pop("weight", None)
    if matrix is not None:
        # Mamba asks its output matrix what type it multiplies.
        linear.weight = torch.empty(0, dtype=matrix.dtype, device=matrix.device)
    for name, tensor in zip((NIBBLES, SCALE, ZERO, ORDER), _tensors(weight), strict=True):
        linear.register_buffer(name, tensor)
    linear.forward = GroupedForward(linear, weight.size)  # type: ignore[method-assign]


def keep_dense(linear: torch.nn.Linear, dtype: torch.dtype) -> None:
    """Have `linear`, which keeps its weight in groups, compute with a matrix of `dtype` instead."""
    weight = grouped_weight(linear)
    assert weight is not None, linear
    for name in (NIBBLES, SCALE, ZERO, ORDER):
        del linear._buffers[name]
    del linear.forward
    linear.weight = torch.nn.Parameter(weight.dense(dtype), requires_grad=False)


def grouped_weight(linear: Any) -> GroupedWeight | None:
    """What `keep_grouped` gave to `linear`, if it did."""
    forward = vars(linear).get("forward") if isinstance(linear, torch.nn.Module) else None
    return forward.weight if isinstance(forward, GroupedForward) else None


class GroupedForward:
    """Replaces `forward` of a linear layer, whose buffers move and are freed with it."""

    def __init__(self, linear: torch.nn.Linear, size: int) -> None:
        self._linear = linear
        self._size = size

    @property
    def weight(self) -> GroupedWeight:
        """What the layer keeps."""
        linear: Any = self._linear
        return GroupedWeight(
            *(getattr(linear, NIBBLES), getattr(linear, SCALE), getattr(linear, ZERO)),
            *(self._size, getattr(linear, ORDER)),
        )

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out] from [..., in]."""
        return torch.nn.functional.linear(input, self.weight.dense(input.dtype), self._linear.bias)


def contiguous_groups(weight: GroupedWeight, group_of: torch.Tensor) -> GroupedWeight:
    """`weight`, whose inputs were in any order and belong to groups `group_of` int[K], with inputs sorted by group.

    Raises ValueError unless each group has as many inputs as its size says.
    """
    inputs = weight.shape[1]
    order = torch.argsort(group_of.long(), stable=True)
    if not torch.equal(group_of.long()[order], torch.arange(inputs, device=order.device) // weight.size):
        raise ValueError(f"its groups do not have {weight.size} inputs each")
    if torch.equal(order, torch.arange(inputs, device=order.device)):
        return weight
    values = torch.stack([weight.nibbles & 15, weight.nibbles >> 4], dim=2).view(-1, inputs)
    return replace(weight, nibbles=pack_nibbles(values[:, order]), order=order)


def _tensors(weight: GroupedWeight) -> tuple[torch.Tensor | None, ...]:
    return weight.nibbles, weight.scale, weight.zero, weight.order
