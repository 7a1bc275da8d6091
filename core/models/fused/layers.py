"""Layers of transformers models that compute by fused kernels on a GPU, and the way back.

Only classes whose forward pass is known, by name; the load-time self-check then compares the model with what it
computed before. Linear layers inside stay modules, so adapters hook them as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch

NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""weight · x / rms(x), rounded to x's dtype before the weight. Gemma's adds one to it, and is not among them."""
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""down(act(gate(x)) · up(x))."""
SILU = ("SiLU", "SiLUActivation")
ROTATED = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Attention classes that call `apply_rotary_pos_emb(q, k, cos, sin)` of their module, which rotates the two halves of a
head against each other."""
ROTARY = "apply_rotary_pos_emb"


def wanted(device: torch.device) -> bool:
    """Whether fused layers are used on `device`, for models that have any."""
    return device.type == "cuda" and find_spec("triton") is not None


def fuse_layers(model: torch.nn.Module) -> int:
    """Make the known layers of `model` compute by fused kernels. Returns how many there are."""
    count = 0
    for module in model.modules():
        fused = _fused(module)
        if fused is not None:
            # On the instance, so that it is found before the method of the class, which stays as it is.
            module.__dict__["forward"] = fused
            count += 1
    return count


def unfuse_layers(model: torch.nn.Module) -> None:
    """Undo `fuse_layers`."""
    for module in model.modules():
        if _fused(module) is not None:
            module.__dict__.pop("forward", None)


def _fused(module: torch.nn.Module) -> Callable[..., Any] | None:
    name = type(module).__name__
    if name in NORMS and isinstance(getattr(module, "variance_epsilon", None), float):
        return partial(_normed, module)
    if name in GATED and type(getattr(module, "act_fn", None)).__name__ in SILU:
        return partial(_gated, module)
    return _rotated(module) if name in ROTATED else None


def _rotated(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The module's own forward pass with another rotation: the same code over a copy of its globals.

    So other models of the process keep the code of transformers. None if that code is not as expected.
    """
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names or forward.__closure__:
        return None
    ours = {**forward.__globals__, ROTARY: partial(_rotate, forward.__globals__[ROTARY])}
    copy = FunctionType(forward.__code__, ours, forward.__name__, forward.__defaults__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return partial(copy, module)


def _rotate(
    plain: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any
) -> Any:
    from core.models.fused.rotary import rotate

    width, known = q.shape[-1], not rest and q.dim() == 4 and q.shape[0] == 1
    fits = cos.shape == (1, q.shape[2], width) and width % 2 == 0 and q.stride(-1) == k.stride(-1) == 1
    return rotate(q, k, cos, sin) if known and fits else plain(q, k, cos, sin, *rest)


def _normed(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    from core.models.fused.norm import rms_norm

    if module.weight.dtype != hidden_states.dtype:
        plain: torch.Tensor = type(module).forward(module, hidden_states)
        return plain
    out: torch.Tensor = rms_norm(hidden_states, module.weight, module.variance_epsilon)
    return out


def _gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    from core.models.fused.activation import silu_mul

    out: torch.Tensor = module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))
    return out
