"""Attention backends by the name that configuration uses. A new one is a new file and one line here."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from core.attention.base import AttentionBackend
from core.errors import ConfigError

ATTENTION_BACKENDS: dict[str, str] = {
    "torch_native": "core.attention.torch_native:TorchNativeAttention",
    "triton": "core.attention.triton.backend:TritonAttention",
    "varlen": "core.attention.varlen_backend:VarlenAttention",
    "flashinfer": "core.attention.flashinfer_backend:FlashInferAttention",
}
"""Name -> `module:class`. Imported only when it is chosen: a backend may need packages that are not installed."""
INVARIANT = {"triton": "core.attention.triton.fixed_backend:FixedTritonAttention"}
"""Name -> what serves in its place where a query must get the same bits in any step."""


def build_attention(name: str, device: torch.device, invariant: bool = False) -> AttentionBackend:
    """A new backend; `auto` takes the best one for `device`. `invariant`: what stands for it in `INVARIANT`, if any.

    Raises ConfigError for an unknown name, a missing package, or a device that the backend cannot run on, with the
    reason.
    """
    chosen = default_attention(device) if name == "auto" else name
    target = ATTENTION_BACKENDS.get(chosen)
    if target is None:
        raise ConfigError(f"attention_backend must be one of auto, {', '.join(ATTENTION_BACKENDS)}; got {name!r}")
    module, _, attribute = (INVARIANT.get(chosen, target) if invariant else target).partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"attention backend {chosen!r} cannot be imported: {error}") from error
    reason = factory.why_not(device)
    if reason is not None:
        raise ConfigError(f"attention backend {chosen!r} cannot run on {device}: {reason}")
    backend = factory()
    assert isinstance(backend, AttentionBackend), backend
    return backend


def default_attention(device: torch.device) -> str:
    """The name that `auto` stands for on `device`."""
    # CUDA builds of PyTorch normally bring Triton; a build without it uses the backend of the CPU.
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch_native"
