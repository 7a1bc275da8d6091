"""MLPs and mixtures of experts of a layer, taken off its modules by its family's declaration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.models.native.declaration import BesideNames, Family
from core.models.native.matrices import one_behind_the_other, vector
from core.models.native.mixtures import read_gating, read_router, router_norm, router_product, stacked
from core.models.native.parts import Beside, Curve, Experts, Mlp
from core.models.native.reading import ACTIVATIONS, NotDense, activation_name, read_curve, read_norm
from core.models.native.recurrences import Fuse, scaled


def mlp_of(layer: Any, family: Family) -> Any:
    """The MLP of `layer`; None if it has none."""
    if not family.mlp:
        return layer
    module = getattr(layer, family.mlp, None) or getattr(layer, family.mixture.shared, None)
    return module if any(hasattr(module, name) for name in (family.into[0], family.mixture.experts)) else None


def mixture_of(layer: Any, family: Family) -> Any:
    """What of `layer` has router and experts, its MLP or itself; None if there are none."""
    held = layer if family.mixture.beside is not None else mlp_of(layer, family)
    return held if getattr(held, family.mixture.experts, None) is not None else None


def router_parts(layer: Any, family: Family) -> list[nn.Module]:
    """Modules that choose experts in `layer`: some are linear layers of another dtype than the model's."""
    held = mixture_of(layer, family)
    return [] if held is None else list(getattr(held, family.mixture.router).modules())


def check_feed_forward(layer: Any, family: Family) -> None:
    """Raises NotDense for an activation or a gate that is not known."""
    mlp, held = mlp_of(layer, family), mixture_of(layer, family)
    if held is not None:
        read_gating(getattr(held, family.mixture.experts))
    if mlp is not None and mlp is not held and curve_of(mlp, family) is None:
        _activation(mlp, family)


def read_feed_forward(layer: Any, family: Family, fuse: Fuse, dtype: torch.dtype) -> Mlp | Experts | Beside | None:
    """What `layer` has of MLP and experts, of a model of `dtype`. Raises NotDense."""
    if (mlp := mlp_of(layer, family)) is None:
        return None
    if (held := mixture_of(layer, family)) is None:
        return _mlp(mlp, family, fuse)
    if (names := family.mixture.beside) is None:
        return _experts(layer, held, family, fuse, dtype)
    return _beside(layer, mlp, names, family, fuse, dtype)


def _beside(layer: Any, mlp: Any, names: BesideNames, family: Family, fuse: Fuse, dtype: torch.dtype) -> Beside:
    before_router = router_norm(getattr(layer, family.mixture.router))
    if before_router is None:
        raise NotDense("its router reads the states as they are")
    return Beside(
        mlp=_mlp(mlp, family, fuse),
        experts=_experts(layer, layer, family, fuse, dtype),
        behind_mlp=read_norm(getattr(layer, names.behind_mlp)),
        before_router=before_router,
        before_experts=read_norm(getattr(layer, names.before_experts)),
        behind_experts=read_norm(getattr(layer, names.behind_experts)),
    )


def _experts(layer: Any, held: Any, family: Family, fuse: Fuse, dtype: torch.dtype) -> Experts:
    names, experts = family.mixture, getattr(held, family.mixture.experts)
    gating = read_gating(experts)
    gated = getattr(experts, "has_gate", True)
    into, into_bias = stacked(experts, "gate_up_proj" if gated else "up_proj", gating.parted)
    down, down_bias = stacked(experts, "down_proj", True)
    router, factor = getattr(held, names.router), float(getattr(held, names.factor)) if names.factor else 1.0
    matrix = one_behind_the_other([router_product(router, down.shape[1])])
    shared = getattr(held, names.shared, None) or getattr(layer, names.shared, None) if names.shared else None
    found, common = read_router(router, matrix, dtype, getattr(held, names.correction, None)), None
    if shared is not None:
        common = _mlp(shared, family, fuse)
        if names.means(held):
            half = torch.full((common.down.weight.shape[0],), 0.5)
            factor, common = factor / 2, common._replace(down=scaled(common.down, half, half))
    return Experts(
        router=found._replace(factor=found.factor * factor),
        into=into,
        into_bias=into_bias,
        down=down,
        down_bias=down_bias,
        gated=gated,
        activation=gating.activation,
        clamp=gating.clamp,
        shared=common,
        shared_gate=vector(getattr(held, names.shared_gate), dtype) if names.shared_gate else None,
        weighs_inputs=names.weighs_inputs,
    )


def _mlp(mlp: Any, family: Family, fuse: Fuse) -> Mlp:
    parts = fuse(mlp, family.into), fuse(mlp, [family.down])
    curve = curve_of(mlp, family)
    return Mlp(*parts, family.gated, "" if curve is not None else _activation(mlp, family), curve)


def curve_of(mlp: Any, family: Family) -> Curve | None:
    """The activation of `mlp` if it has numbers of its own. Raises NotDense."""
    return read_curve(getattr(mlp, family.activation, None))


def _activation(mlp: Any, family: Family) -> str:
    known = family.activation in ACTIVATIONS
    return family.activation if known else activation_name(getattr(mlp, family.activation))
