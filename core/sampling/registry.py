"""Samplers by the devices that they are for. A new one is a new file and one line here."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

from core.sampling.sampler import Sampler

SAMPLERS: Final[dict[str, str]] = {
    "torch": "core.sampling.sampler:Sampler",
    "triton": "core.sampling.triton.sampler:TritonSampler",
}
"""Name -> `module:class`. Imported only when it is chosen: one may need packages that are not installed."""


def build_sampler(vocab_size: int, device: torch.device) -> Sampler:
    """The best sampler of `vocab_size` logits for `device`, which compiles what it needs now and nothing later."""
    module, _, attribute = SAMPLERS[default_sampler(device)].partition(":")
    sampler = getattr(import_module(module), attribute)(vocab_size, device)
    assert isinstance(sampler, Sampler), sampler
    sampler.warm()
    return sampler


def default_sampler(device: torch.device) -> str:
    """The name of the sampler that `device` gets."""
    # CUDA builds of PyTorch normally bring Triton; a build without it runs the operations of PyTorch there.
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"
