"""Recurrent mixers as `parts` has them, read off modules of transformers: what a module has says which kind it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from core.memory.recurrent.state_pool import StateLayerSpec
from core.models.native.parts import Conv, Mamba2, Matrix, Norm, ShortConv
from core.models.native.reading import NotDense, activation_name

Fuse = Callable[[Any, Sequence[str]], Matrix]
"""Of a module and names: one matrix of the rows of the linear layers that it has under these names."""

LANES = 16
"""Native code takes so many channels, or elements of a state, at a time."""


def read_recurrence(module: Any, state: StateLayerSpec, fuse: Fuse) -> ShortConv | Mamba2:
    """The mixer that `module` is, whose states are those of `state`. Raises NotDense."""
    for has, read in READERS.items():
        if all(hasattr(module, name) for name in has):
            sizes = (state.conv.shape[0], *(state.recurrent.shape[1:] if state.recurrent else ()))
            if state.recurrent and state.recurrent.dtype != torch.float32:
                raise NotDense("its recurrent states are not float32")
            if any(size % LANES for size in sizes):
                raise NotDense(f"its states have sizes {sizes}, not all multiples of {LANES}")
            return read(module, fuse)
    raise NotDense(f"its {type(module).__name__} is a mixer of another kind")


def scaled(matrix: Matrix, factors: torch.Tensor, bias_factors: torch.Tensor | None = None) -> Matrix:
    """`matrix` with its outputs multiplied by `factors` [N], and its bias by others if there are any."""
    scale = factors if matrix.scale is None else matrix.scale * factors
    bias = None if matrix.bias is None else matrix.bias * (factors if bias_factors is None else bias_factors)
    return Matrix(matrix.weight, scale, bias)


def _short_conv(module: Any, fuse: Fuse) -> ShortConv:
    return ShortConv(fuse(module, ["in_proj"]), _conv(module.conv), fuse(module, ["out_proj"]))


def _mamba2(module: Any, fuse: Fuse) -> Mamba2:
    if activation_name(module.act) != "silu":
        raise NotDense("its convolutions have another activation than silu")
    if tuple(module.time_step_limit) != (0.0, float("inf")):
        raise NotDense("its time steps have limits")
    into, given = fuse(module, ["in_proj"]), getattr(module, "mup_vector", None)
    if given is not None:
        by_output = given.detach().float().reshape(-1)
        # The input is multiplied too, which the bias does not see.
        into = scaled(into, by_output * float(module.ssm_in_multiplier), by_output)
    norm, eps = None, getattr(module.norm, "variance_epsilon", None)
    if eps is not None:
        weight = module.norm.weight.detach().float()
        norm = Norm(weight, None, float(eps), False, len(weight) // module.n_groups)
    return Mamba2(
        into=into,
        conv=_conv(module.conv1d),
        out=fuse(module, ["out_proj"]),
        decay=-module.A_log.detach().float().exp(),
        skip=module.D.detach().float(),
        step_bias=module.dt_bias.detach().float(),
        norm=norm,
        gate_first=norm is None or not getattr(module.norm, "norm_before_gate", False),
        groups=module.n_groups,
    )


def _conv(conv: Any) -> Conv:
    return Conv(conv.weight.detach().squeeze(1), None if conv.bias is None else conv.bias.detach())


READERS: dict[tuple[str, ...], Callable[[Any, Fuse], ShortConv | Mamba2]] = {
    ("in_proj", "conv", "out_proj"): _short_conv,
    ("in_proj", "conv1d", "dt_bias", "A_log", "norm"): _mamba2,
}
"""By what a module of that kind has."""
