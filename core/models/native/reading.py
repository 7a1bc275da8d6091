"""What a norm, an activation or a rotary embedding computes: found by trying the module, whatever its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from core.models.native.parts import Curve, Norm, Rotary

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
"""By the names that `activations.h` has for them."""

ALIKE = 5e-6
"""The two forms of gelu differ by 5e-4."""

CURVED = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""The same of an activation with numbers of its own."""

TURNED = 2e-2
"""Of an angle's cosine in 16 bits."""

NORM_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of the largest output. A weight that is taken for its offset form, or a mean that is left in, is off by far more."""


class NotDense(Exception):
    """The model has something that the native code does not compute; the message names it."""


@torch.inference_mode()
def activation_name(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The one of ACTIVATIONS that `function` is. Raises NotDense."""
    x = torch.linspace(-6.0, 6.0, 97)
    got = function(x)
    for name, candidate in ACTIVATIONS.items():
        if torch.allclose(got, candidate(x), atol=ALIKE, rtol=0):
            return name
    raise NotDense(f"its activation is {type(function).__name__}")


@torch.inference_mode()
def read_curve(module: Any) -> Curve | None:
    """The curve that an activation with numbers of its own draws; None for one without. Raises NotDense."""
    if not hasattr(module, "alpha_p"):
        return None
    given, linear = module.alpha_p, float(module.beta)
    below = linear + float(functional.softplus(module.alpha_n))
    curve = Curve(float(functional.softplus(module.alpha_p)), below, linear, float(module.eps))
    x = torch.linspace(-6.0, 6.0, 97).to(given)
    wanted = torch.where(x > 0, curve.above * x * x, (torch.expm1(x.clamp(max=curve.most)) - x) * below) + linear * x
    if float((module(x) - wanted).float().abs().max()) > CURVED[given.dtype] * float(wanted.abs().max()):
        raise NotDense(f"its activation is {type(module).__name__}")
    return curve


@torch.inference_mode()
def read_norm(module: Any, width: int | None = None) -> Norm:
    """What `module`, a norm of the last dimension of its input, computes; without weights it may not know its `width`.

    Raises NotDense.
    """
    each = list(getattr(module, "norms", ()))
    if each:
        parts = [read_norm(norm) for norm in each]
        biases = [part.bias for part in parts if part.bias is not None]
        weight = torch.cat([part.weight for part in parts])
        return parts[0]._replace(weight=weight, bias=torch.cat(biases) if biases else None)
    given = getattr(module, "weight", None)
    shape = getattr(module, "normalized_shape", (width,)) if given is None else tuple(given.shape)
    dtype = torch.float32 if given is None else given.dtype
    # A mean that is not nothing, so that it shows whether it is taken off.
    x = (torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    x = x if given is None else x.to(given.device)
    got = module(x).float()
    for norm in _candidates(module, shape):
        if float((got - plain_norm(norm, x)).abs().max()) <= NORM_TOLERANCE[dtype] * float(got.abs().max()):
            return norm
    raise NotDense(f"its {type(module).__name__} is a norm of another kind")


def _candidates(module: Any, shape: tuple[int, ...]) -> Iterator[Norm]:
    given, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    weight = torch.ones(shape) if given is None else given.detach().float()
    eps = next((float(getattr(module, name)) for name in ("variance_epsilon", "eps") if hasattr(module, name)), 1e-5)
    for centred in (False, True):
        for offset in (0.0, 1.0):
            added = None if bias is None else bias.detach().float().reshape(-1)
            yield Norm((weight + offset).reshape(-1).contiguous(), added, eps, centred, shape[-1])


def plain_norm(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    """float32, shape of x: what `norm` makes of x [n, ..., width]."""
    wide = x.float()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.view(x.shape[1:])
    return normed if norm.bias is None else normed + norm.bias.view(x.shape[1:])


class RotaryTables:
    """Tables of a model's rotary embedding, one for each type of layer that it has; [positions, R / 2], on its device.

    They are of the type that it gives for states of `dtype`. A model that turns nothing has no such module.
    """

    def __init__(
        self, module: Any, positions: int, neighbours: bool, dtype: torch.dtype = torch.float32, backwards: bool = False
    ) -> None:
        """`backwards`: whether queries and keys are turned the other way round."""
        self._module, self._positions, self._neighbours, self._dtype = module, positions, neighbours, dtype
        self._backwards = backwards
        self._by_type = module is not None and "layer_type" in inspect.signature(module.forward).parameters
        self._made: dict[str, Rotary] = {}

    def of(self, layer_type: str) -> Rotary:
        """The table for layers of that type; one object for all of them."""
        key = layer_type if self._by_type else ""
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    @torch.inference_mode()
    def _make(self, layer_type: str) -> Rotary:
        device = next((buffer.device for buffer in self._module.buffers()), torch.device("cpu"))
        places = torch.arange(self._positions, device=device)[None]
        if hasattr(self._module, "mrope_section"):
            # Places of text are alike on all three axes; up to transformers 5.22 such a module wants all of them.
            places = places.expand(3, 1, -1)
        states = torch.zeros(1, 1, 1, dtype=self._dtype, device=device)
        made = self._module(states, places, *([layer_type] if self._by_type else []))
        if isinstance(made, torch.Tensor):  # of complex numbers
            made = torch.view_as_real(made).unbind(-1)
        wide = self._dtype is torch.float32
        first, second = (half_of(table[0].float() if wide else table[0]) for table in made)
        cos, sin = _cosines_first(first, second)
        sin = -sin if self._backwards else sin
        return Rotary(cos.contiguous(), sin.contiguous(), self._neighbours)


def check_turns(given: tuple[torch.Tensor, torch.Tensor] | None, rotary: Rotary | None) -> None:
    """Raises NotDense where a layer's own module was `given` other angles than those of `rotary`.

    In 16 bits logits of a few tokens do not tell one base from another.
    """
    if given is None or rotary is None:
        return
    cos, sin = _cosines_first(*(half_of(table.float()) for table in given))
    if cos.shape[1] != rotary.cos.shape[1]:
        return  # as complex numbers, or of several axes
    count = min(len(cos), len(rotary.cos))
    # Some are turned the other way round.
    pairs = (cos, rotary.cos), (sin.abs(), rotary.sin.abs())
    if any(float((one[:count] - other[:count].to(one)).abs().max()) > TURNED for one, other in pairs):
        raise NotDense("its layers are given other angles than its rotary embedding makes")


def _cosines_first(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # At position 0 every angle is 0: GPT-J gives sines first.
    return (first, second) if bool((first[0] != 0).all()) else (second, first)


def half_of(table: torch.Tensor) -> torch.Tensor:
    """[positions, R / 2]: `table` without repetitions: some are made with neighbours, or halves, that are equal."""
    width = table.shape[1]
    if width % 2 == 0:
        if torch.equal(table[:, ::2], table[:, 1::2]):
            return table[:, ::2]
        if torch.equal(table[:, : width // 2], table[:, width // 2 :]):
            return table[:, : width // 2]
    return table
