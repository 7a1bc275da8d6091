"""Modules that have a dense matrix and what stands right behind it, in one pass of compiled code.

Layers of BERT and its kin are made of such: a matrix and its activation, or a matrix, a residual and a norm. torch goes
through memory for each of them, on threads that wait for each other. A module is known by what it has, and asked once
whether it computes that: as its own `forward` does, on a few rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from core.models.products.packing import Forward, ForwardOf, UnscaledForward, activation_of

ROWS: Final = 3
"""Of the trial."""
TOLERANCE: Final[Mapping[torch.dtype, float]] = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of what the module itself computes, by the largest of it: activations are other polynomials, and sums of halves are
rounded once, not after each operation."""
NORMS: Final = {"LayerNorm": "eps", "DebertaLayerNorm": "variance_epsilon", "IntLayerNorm": "eps"}
"""Classes of norms by mean and variance, and what they call the least variance."""
NO_NORMS: Final = ("NoNorm",)
"""Classes of modules that only multiply by a weight and add a bias: MobileBERT's."""


@dataclass(slots=True)
class Parts:
    """What a module has."""

    dense: list[str] = field(default_factory=list)
    """Names of its matrices that are packed."""
    behind: list[nn.Module] = field(default_factory=list)
    """Activations and norms."""
    others: list[str] = field(default_factory=list)
    scaled: bool = False
    """Whether each tensor that it takes and gives has a scale beside it, which in floats is none: I-BERT's."""


class ThenBottleneck(ForwardOf):
    """`forward` of MobileBERT's output: joined as far as its bottleneck, which has a residual of its own."""

    def __init__(self, module: Any, joined: Forward, name: str) -> None:
        self._module, self._joined, self._name = module, joined, name

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
        """[..., K], [..., N] and [..., H] to [..., H]."""
        found: torch.Tensor = getattr(self._module, self._name)(self._joined(x, residual), outer)
        return found

    def on(self, module: Any) -> ThenBottleneck:
        """See `ForwardOf`: the bottleneck."""
        return ThenBottleneck(module, self._joined, self._name)


class WithoutScales:
    """`forward` of a module that takes scales of its tensors and answers with one."""

    def __init__(self, joined: Forward) -> None:
        self._joined = joined

    def __call__(
        self, x: torch.Tensor, _: Any, residual: torch.Tensor | None = None, __: Any = None
    ) -> tuple[torch.Tensor, None]:
        """[..., K] and [..., N] to [..., N]."""
        return self._joined(x, residual), None


@torch.inference_mode()
def joined_in(model: nn.Module, packed: Mapping[str, Forward], extension: Any) -> dict[str, Forward]:
    """By name, what stands for `forward` of the modules in `model` that are a matrix of `packed` and what is behind it.

    They are tried on the modules as they are, so `packed` is in place.
    """
    found: dict[str, Forward] = {}
    for name, module in model.named_modules():
        if "forward" in vars(module):
            continue
        parts = _parts_of(name, module, packed)
        if len(parts.dense) != 1 or len(parts.behind) > 1 or len(parts.others) > 1:
            continue
        joined = _joined(parts, packed[parts.dense[0]], extension)
        forward: Forward = WithoutScales(joined) if parts.scaled else joined
        if parts.others:
            forward = ThenBottleneck(module, joined, parts.others[0])
        if _computes_the_same(module, model.get_submodule(parts.dense[0]), forward, scaled=parts.scaled):
            found[name] = forward
    return found


def _parts_of(name: str, module: nn.Module, packed: Mapping[str, Forward]) -> Parts:
    parts = Parts()
    for child, each in module.named_children():
        path = f"{name}.{child}" if name else child
        if isinstance(each, nn.Dropout) or _passes_on(each):
            continue
        if path in packed and isinstance(packed[path], UnscaledForward):
            parts.dense.append(path)
            parts.scaled = True
        elif path in packed and isinstance(each, nn.Linear):
            parts.dense.append(path)
        elif type(each).__name__ in (*NORMS, *NO_NORMS) or _activation_in(each) is not None:
            parts.behind.append(each)
        else:
            parts.others.append(child)
    return parts


def _passes_on(module: nn.Module) -> bool:
    """Whether it would make integers of floats, and is told not to."""
    return type(module).__name__ == "QuantAct" and getattr(module, "quant_mode", None) is False


def _activation_in(module: nn.Module) -> str | None:
    """What `module` computes of each element, also where another module computes it for this one."""
    within = type(module).__name__ == "IntGELU" and getattr(module, "quant_mode", None) is False
    return activation_of(module.activation_fn if within else module)


def _joined(parts: Parts, product: Any, extension: Any) -> Forward:
    behind: Any = parts.behind[0] if parts.behind else None
    kind, named = type(behind).__name__, dict[str, Any]()
    if kind in NORMS and behind.weight is not None:
        bias = None if behind.bias is None else behind.bias.detach()
        named["norm"] = (behind.weight.detach(), bias, float(getattr(behind, NORMS[kind])), True, behind.weight.numel())
    elif kind in NO_NORMS:
        named |= {"scale": behind.weight.detach(), "shift": behind.bias.detach()}
    elif (activation := _activation_in(behind)) is not None:
        named["activation"] = activation
    joined: Forward = extension.Joined(product.product if parts.scaled else product, **named)
    return joined


def _computes_the_same(module: nn.Module, dense: nn.Module, forward: Forward, *, scaled: bool) -> bool:
    """Whether `forward` gives what `module` does, on a few rows."""
    try:
        given = list(_trial(module, dense, scaled=scaled))
        expected: Any = module(*given)
        found = forward(*given)
        if scaled:
            (expected, _), (found, _) = expected, found
        largest = float(expected.float().abs().max())
        error = float((found.float() - expected.float()).abs().max())
        return found.shape == expected.shape and error <= TOLERANCE[expected.dtype] * largest
    except Exception:  # it takes something else, or answers with it
        return False


def _trial(module: nn.Module, dense: Any, *, scaled: bool) -> Iterator[torch.Tensor | None]:
    """Rows for the module's matrix, and residuals as wide as what it, and what is behind it, gives."""
    widths = [dense.in_features, dense.out_features]
    widths += [each.out_features for each in module.modules() if isinstance(each, nn.Linear) and each is not dense]
    takes = [each for each in inspect.signature(module.forward).parameters.values() if each.default is each.empty]
    draw = torch.Generator().manual_seed(0)
    for width, _ in zip(widths, takes[:: 1 + scaled], strict=False):
        yield torch.randn(1, ROWS, width, generator=draw).to(dense.weight.dtype)
        if scaled:
            yield None
