"""Recurrent mixers as `parts` has them, read off modules of transformers: what a module has says which kind it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.activations import ACT2FN

from core.memory.recurrent.state_pool import StateLayerSpec
from core.models.native.parts import Conv, DeltaNet, Mamba1, Mamba2, Matrix, Norm, ShortConv
from core.models.native.reading import NotDense, activation_name, read_norm

Fuse = Callable[[Any, Sequence[str]], Matrix]
"""Of a module and names: one matrix of the rows of the linear layers that it has under these names."""

Recurrence = ShortConv | Mamba2 | Mamba1 | DeltaNet

LANES = 16
"""Native code takes so many channels, or elements of a head, at a time."""


def read_recurrence(module: Any, state: StateLayerSpec, fuse: Fuse) -> Recurrence:
    """The mixer that `module` is, whose states are those of `state`. Raises NotDense."""
    for has, read in READERS.items():
        if all(hasattr(module, name) for name in has):
            # Of [channels, N] a state may have any N; heads have [heads, elements, elements].
            heads = state.recurrent.shape[1:] if state.recurrent and len(state.recurrent.shape) == 3 else ()
            sizes = (state.conv.shape[0], *heads)
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
    return matrix._replace(scale=scale, bias=bias)


def _short_conv(module: Any, fuse: Fuse) -> ShortConv:
    return ShortConv(fuse(module, ["in_proj"]), _conv(module.conv), fuse(module, ["out_proj"]))


def _mamba2(module: Any, fuse: Fuse) -> Mamba2:
    _check_silu(module)
    into, given = fuse(module, ["in_proj"]), getattr(module, "mup_vector", None)
    if given is not None:
        by_output = given.detach().float().reshape(-1)
        # The input is multiplied too, which the bias does not see.
        into = scaled(into, by_output * float(module.ssm_in_multiplier), by_output)
    norm, eps = None, getattr(module.norm, "variance_epsilon", None)
    if eps is not None:
        weight = module.norm.weight.detach().float()
        norm = Norm(weight, None, float(eps), False, _normed_together(module.norm, len(weight)))
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
        shortest=float(module.time_step_limit[0]),
        longest=float(module.time_step_limit[1]),
    )


def _normed_together(norm: Any, width: int) -> int:
    """How many of the `width` elements a gated norm takes as one: up to transformers 5.22 most take all."""
    return int(getattr(norm, "group_size", width // getattr(norm, "n_groups", 1)))


def _mamba1(module: Any, fuse: Fuse) -> Mamba1:
    _check_silu(module)
    widths = {"dt": module.time_step_rank, "b": module.ssm_state_size, "c": module.ssm_state_size}
    norms = {getattr(module, f"{name}_layernorm", None): width for name, width in widths.items()}
    return Mamba1(
        into=fuse(module, ["in_proj"]),
        conv=_conv(module.conv1d),
        choices=fuse(module, ["x_proj"]),
        steps=fuse(module, ["dt_proj"]),
        out=fuse(module, ["out_proj"]),
        decay=-module.A_log.detach().float().exp(),
        skip=module.D.detach().float(),
        norms=[_narrow(read_norm(norm), width) for norm, width in norms.items() if norm is not None],
    )


def _narrow(norm: Norm, width: int) -> Norm:
    """Of so many elements: FalconMamba gives ones for more than there are, and does not look at them."""
    return norm._replace(weight=norm.weight[:width], width=width)


def _delta_net_by_heads(module: Any, fuse: Fuse) -> DeltaNet:
    return _delta_net(module, fuse, reordered(fuse(module, ["in_proj_qkvz", "in_proj_ba"]), _delta_order(module)))


def _delta_net_by_kinds(module: Any, fuse: Fuse) -> DeltaNet:
    return _delta_net(module, fuse, fuse(module, ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]))


def _delta_net(module: Any, fuse: Fuse, into: Matrix) -> DeltaNet:
    _check_silu(module)
    weight = module.norm.weight.detach().float()
    return DeltaNet(
        into=into,
        conv=_conv(module.conv1d),
        out=fuse(module, ["out_proj"]),
        decay=-module.A_log.detach().float().exp(),
        step_bias=module.dt_bias.detach().float(),
        norm=Norm(weight, None, float(module.norm.variance_epsilon), False, len(weight)),
        key_heads=module.num_k_heads,
    )


def _delta_order(module: Any) -> torch.Tensor:
    """Rows of all queries, keys, values, gates, strengths and step sizes: those of a key head are side by side."""
    heads, key, each = module.num_k_heads, module.head_k_dim, module.num_v_heads // module.num_k_heads
    value = module.head_v_dim * each
    first = torch.arange(heads * 2 * (key + value)).view(heads, -1).split([key, key, value, value], dim=1)
    rest = torch.arange(heads * 2 * each).view(heads, -1).split([each, each], dim=1)
    behind = heads * 2 * (key + value)
    return torch.cat([*(part.reshape(-1) for part in first), *(part.reshape(-1) + behind for part in rest)])


def reordered(matrix: Matrix, rows: torch.Tensor) -> Matrix:
    """`matrix` with row `rows[n]` [N] in place n."""
    if (groups := matrix.groups) is not None:
        zero = None if groups.zero is None else groups.zero[rows]
        matrix = matrix._replace(groups=groups._replace(scale=groups.scale[rows], zero=zero))
    scale, bias = (None if each is None else each[rows] for each in (matrix.scale, matrix.bias))
    return matrix._replace(weight=matrix.weight[rows], scale=scale, bias=bias)


def _check_silu(module: Any) -> None:
    if activation_name(ACT2FN[module.activation]) != "silu":
        raise NotDense("its convolutions have another activation than silu")


def _conv(conv: Any) -> Conv:
    return Conv(conv.weight.detach().squeeze(1), None if conv.bias is None else conv.bias.detach())


READERS: dict[tuple[str, ...], Callable[[Any, Fuse], Recurrence]] = {
    ("in_proj", "conv", "out_proj"): _short_conv,
    ("in_proj", "conv1d", "dt_bias", "A_log", "norm"): _mamba2,
    ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log"): _mamba1,
    ("in_proj_qkvz", "in_proj_ba", "conv1d", "dt_bias", "A_log", "norm"): _delta_net_by_heads,
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "dt_bias", "A_log", "norm"): _delta_net_by_kinds,
}
"""By what a module of that kind has."""
