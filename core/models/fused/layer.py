"""One decoder layer of attention and a dense MLP on a GPU: nine launches, whatever its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn.functional import linear

from core.models.fused.gate import activate
from core.models.fused.heads import HeadLayout, enter_heads
from core.models.fused.residual import BIASED, CENTRED, THERE, DeviceNorm, Sums, add_and_norm, norms_of
from core.models.native.parts import Attention, Layer, Matrix, Mlp, Norm
from core.models.native.reading import NotDense


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer: `weight` [N, K] and `bias` [N] of the model's dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, matrix: Matrix) -> Self:
        """Raises NotDense for a matrix that is not plain."""
        if matrix.scale is not None or matrix.groups is not None:
            raise NotDense("its matrices are scaled by output")
        return cls(matrix.weight, matrix.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


Attend = Callable[..., torch.Tensor]
"""`AttentionBackend.forward` of the pool of a layer."""


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What the step gives to one layer."""

    attend: Attend
    keys: torch.Tensor
    """The pool's, [slots, Hkv, D]."""
    values: torch.Tensor
    positions: torch.Tensor
    """int64[T]."""
    slots: torch.Tensor
    """int64[T], in the pool of this layer."""
    k_scales: torch.Tensor | None
    """[slots, Hkv]: the scales of the keys' codes; None where the pool holds numbers."""
    v_scales: torch.Tensor | None


class DenseLayer:
    """Made from a declared layer whose rows of queries, keys and values are as its module has them."""

    def __init__(
        self,
        layer: Layer,
        layer_id: int,
        by_head: bool,
        device: torch.device,
        product: type[Product],
    ) -> None:
        """`product` computes its matrices. Raises NotDense for what it does not compute."""
        (mixer,) = layer.mixers if len(layer.mixers) == 1 else (None,)
        if not isinstance(mixer, Attention) or not isinstance(layer.mlp, Mlp):
            raise NotDense("its layers are not all attention and a dense MLP")
        if layer.parallel and (layer.after_mixers or layer.after_mlp):
            raise NotDense("its parallel layers have norms behind their products")
        self.before_mixers, self.after_mixers, self.before_mlp, self.after_mlp = (
            device_norm(each, device)
            for each in (layer.before_mixers, layer.after_mixers, layer.before_mlp, layer.after_mlp)
        )
        self.parallel, self.factor = layer.parallel, layer.multiplier
        self._attention = DenseAttention(mixer, layer_id, by_head, device, product)
        self._into, self._down = product.of(layer.mlp.into), product.of(layer.mlp.down)
        self._inner = len(self._into.weight) // (2 if layer.mlp.gated else 1)
        self._activation = layer.mlp.activation

    def run(self, sums: Sums, step: LayerStep) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The states so far, [T, C], and what has yet to be added to them, behind `after_mlp` and times `factor`."""
        states, read, other = sums
        mixed = self._attention.run(read, step)
        if not self.parallel:
            states, other, _ = add_and_norm(states, [mixed], self.after_mixers, self.factor, self.before_mlp)
        inner = self._into(other)
        opened = inner.new_empty(len(inner), self._inner)
        activate(inner, opened, self._activation)
        added = self._down(opened)
        return states, [mixed, added] if self.parallel else [added]


class DenseAttention:
    """Queries, keys and values in one product; norms, rotation and the write to the pool in one kernel."""

    def __init__(
        self,
        mixer: Attention,
        layer_id: int,
        by_head: bool,
        device: torch.device,
        product: type[Product],
    ) -> None:
        self._id, shape = layer_id, mixer.shape
        self._qkv, self._out = product.of(mixer.qkv), product.of(mixer.out)
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        if len(self._qkv.weight) != rows:
            raise NotDense("its attention has more than queries, keys and values, such as gates")
        if mixer.rotary is not None and mixer.rotary.cos.shape[1] * 2 > shape.head_dim:
            raise NotDense("more elements are turned than a head has")
        rotary = mixer.rotary
        self._cos = None if rotary is None else rotary.cos.to(device)
        self._sin = None if rotary is None else rotary.sin.to(device)
        self._temperature = None if mixer.temperature is None else mixer.temperature.float().to(device)
        norms = [device_norm(each, device) for each in (mixer.q_norm, mixer.k_norm)]
        self._norms, self._eps, kinds = norms_of(self._qkv.weight, *norms)
        self._layout = _layout(mixer, by_head, kinds)
        self._span: dict[str, Any] = {
            "scale": mixer.scale,
            "sliding_window": mixer.window or None,
            "chunk_size": mixer.chunk or None,
            "softcap": mixer.cap or None,
            "sinks": mixer.sinks,
        }

    def run(self, read: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """[T, C] from [T, C]; stores the keys and values of all tokens."""
        qkv = self._qkv(read)
        # fmt: off
        enter_heads(
            qkv, step.keys, step.values, step.positions, step.slots, self._cos, self._sin, self._temperature,
            self._norms, self._eps, list(self._layout), step.k_scales, step.v_scales,
        )
        # fmt: on
        q, k, v = self._layout.split(qkv)
        attended = step.attend(self._id, q, k, v, stored=True, **self._span)
        return self._out(attended.view(len(attended), -1))


def device_norm(norm: Norm | None, device: torch.device) -> DeviceNorm | None:
    """`norm` as kernels take it."""
    if norm is None:
        return None
    kind = THERE | CENTRED * norm.centred | BIASED * (norm.bias is not None)
    bias = None if norm.bias is None else norm.bias.to(device)
    return DeviceNorm(norm.weight.to(device), bias, norm.eps, kind)


def _layout(mixer: Attention, by_head: bool, kinds: list[int]) -> HeadLayout:
    heads, kv_heads, dim = mixer.shape
    whole = False
    steps = []
    for norm, count in ((mixer.q_norm, heads), (mixer.k_norm, kv_heads)):
        if norm is not None and norm.width not in (dim, count * dim):
            raise NotDense("its norms of queries or keys are neither of a head nor of all heads")
        whole = whole or (norm is not None and norm.width > dim)
        steps.append(dim if norm is not None and norm.weight.numel() == count * dim else 0)
    widths = {norm.width for norm in (mixer.q_norm, mixer.k_norm) if norm is not None}
    if whole and dim in widths and kv_heads > 1:
        raise NotDense("its norms of queries and of keys differ in kind")
    return HeadLayout(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        step=3 * dim if by_head else dim,
        keys=dim if by_head else heads * dim,
        values=2 * dim if by_head else (heads + kv_heads) * dim,
        half=0 if mixer.rotary is None else mixer.rotary.cos.shape[1],
        neighbours=mixer.rotary is not None and mixer.rotary.neighbours,
        whole=whole,
        turns_first=mixer.turns_first,
        q_kind=kinds[0],
        k_kind=kinds[1],
        q_step=steps[0],
        k_step=steps[1],
    )
