"""Which modules of a tree are dense matrices, and what computes them in compiled code instead of their `forward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

PLAIN = (torch.Tensor, nn.Parameter)
FLAGS = ("has_gate", "has_bias", "is_transposed")
"""What all modules of experts say of themselves, and no others."""
DTYPES = (torch.float32, torch.bfloat16)

ACTIVATIONS: Final = {
    "FastGELUActivation": "gelu_tanh",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
"""Classes of modules of torch and transformers, as `activations.h` calls what they compute."""

Forward = Callable[..., Any]


class Matrices(Protocol):
    """One module's matrices, and how they are packed."""

    @property
    def module(self) -> nn.Module:
        """Whose they are."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The module's parameters that are not needed any more once they are packed."""
        ...

    def pack(self, extension: Any, crew: Any) -> Forward:
        """What stands for the module's `forward`."""
        ...


class DenseLinear:
    """An `nn.Linear` with plain weights."""

    names = ("weight",)

    def __init__(self, module: Any) -> None:
        self.module = module

    def weight(self) -> torch.Tensor:
        """[out, in]."""
        weight: torch.Tensor = self.module.weight.detach()
        return weight

    def pack(self, extension: Any, crew: Any) -> Forward:
        """See `Matrices`."""
        weight, bias = self.weight(), self.module.bias
        halves = weight.dtype == torch.bfloat16
        product: Forward = extension.Product(crew, halves, weight, None, None if bias is None else bias.detach())
        return product


class TransposedLinear(DenseLinear):
    """A `Conv1D` of transformers, which is linear too, over a weight [in, out]: GPT-2's."""

    def weight(self) -> torch.Tensor:
        """See `DenseLinear`."""
        return super().weight().t()


class UnscaledLinear(DenseLinear):
    """I-BERT's, which answers with outputs and their scale, and computes in floats, which have none."""

    def pack(self, extension: Any, crew: Any) -> Forward:
        """See `Matrices`."""
        return UnscaledForward(super().pack(extension, crew))


class UnscaledForward:
    """What `product` makes, and no scale of it."""

    def __init__(self, product: Forward) -> None:
        self.product = product

    def __call__(self, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        """[..., K] to [..., N]; the scale of x is left out."""
        return self.product(x), None


class ElementwiseActivation:
    """A module that has no weights and makes each element another."""

    names = ()

    def __init__(self, module: nn.Module, kind: str) -> None:
        self.module = module
        self._kind = kind

    def pack(self, extension: Any, crew: Any) -> Forward:
        """See `Matrices`."""
        activated: Forward = extension.Activated(crew, self._kind)
        return activated


class DenseExperts:
    """Experts as `transformers` has them: matrices [E, out, in] of all of them, or [E, in, out], in one tensor."""

    def __init__(self, module: Any) -> None:
        self.module: Any = module
        self.names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")

    def pack(self, extension: Any, crew: Any) -> Forward:
        """See `Matrices`."""
        into, out = (self._packed(extension, crew, name) for name in self.names)
        return ExpertsForward(self.module, into, out)

    def _packed(self, extension: Any, crew: Any, name: str) -> Any:
        module = self.module
        bias = getattr(module, f"{name}_bias").detach() if module.has_bias else None
        return extension.Experts(crew, getattr(module, name).detach(), bias, module.is_transposed)


class ForwardOf:
    """`forward` of a module that has other parts of the module compute."""

    def on(self, module: Any) -> ForwardOf:
        """The same for a copy of the module, whose parts are then its own."""
        raise NotImplementedError


class ExpertsForward(ForwardOf):
    """`forward` of a module of experts, after `batched_mm_experts_forward` of transformers (5.24).

    Between the two products the module's own gate or activation computes, with whatever limits a family has.
    """

    def __init__(self, module: Any, into: Any, out: Any) -> None:
        self._module = module
        self._into = into
        self._out = out

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """[T, H] to [T, H]; experts and their weights [T, k]."""
        module, (tokens, each) = self._module, top_k_index.shape
        inner = self._into(hidden_states, top_k_index)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        found = self._out(inner, top_k_index)
        if getattr(module, "has_post_expert_norm", False):
            found = module.post_expert_norm(found)
        weighted = found * top_k_weights.reshape(-1, 1)
        return weighted.view(tokens, each, -1).sum(dim=1).to(hidden_states.dtype)

    def on(self, module: Any) -> ExpertsForward:
        """See `ForwardOf`: the gate."""
        return ExpertsForward(module, self._into, self._out)


def matrices_of(model: nn.Module) -> dict[str, Matrices]:
    """By name, the modules of `model` that compiled code could compute: none that has a `forward` of its own."""
    found: dict[str, Matrices] = {}
    for name, module in model.named_modules():
        if "forward" in vars(module):
            continue
        if type(module) is nn.Linear and _is_plain(module.weight, 2):
            found[name] = DenseLinear(module)
        elif type(module) is Conv1D and _is_plain(module.weight, 2):
            found[name] = TransposedLinear(module)
        elif _is_unscaled(module):
            found[name] = UnscaledLinear(module)
        elif _are_experts(module):
            found[name] = DenseExperts(module)
        elif (kind := activation_of(module)) is not None:
            found[name] = ElementwiseActivation(module, kind)
    return found


def _is_unscaled(module: Any) -> bool:
    named = type(module).__name__ == "QuantLinear"
    return named and getattr(module, "quant_mode", None) is False and _is_plain(module.weight, 2)


def activation_of(module: Any) -> str | None:
    """What `module` computes of each element, as `activations.h` calls it; None for all else."""
    if getattr(module, "inplace", False) or getattr(module, "approximate", "none") != "none":
        return None
    return ACTIVATIONS.get(type(module).__name__)


def _are_experts(module: Any) -> bool:
    # Up to transformers 5.22 none is parallel, nor normed behind.
    if not all(hasattr(module, flag) for flag in FLAGS) or getattr(module, "_is_expert_parallel", False):
        return False
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return all(_is_plain(getattr(module, name, None), 3) for name in names)


def _is_plain(weight: Any, dims: int) -> bool:
    return type(weight) in PLAIN and weight.dim() == dims and weight.dtype in DTYPES and weight.device.type == "cpu"


def put_in_place(model: nn.Module, forwards: Mapping[str, Forward], names: Mapping[str, tuple[str, ...]]) -> int:
    """Have `forwards` compute the modules of these names, and let go of their parameters `names`. Returns how many.

    A place without memory stays where a parameter was, so that its shape and dtype can be asked for.
    """
    count = 0
    modules = dict(model.named_modules())
    for name, forward in forwards.items():
        module = modules[name]
        if "forward" in vars(module):
            continue
        module.forward = forward.on(module) if isinstance(forward, ForwardOf) else forward
        for each in names[name]:
            place = torch.empty_like(getattr(module, each), device="meta")
            setattr(module, each, nn.Parameter(place, requires_grad=False))
        count += 1
    return count
