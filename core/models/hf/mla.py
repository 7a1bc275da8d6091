"""Multi-head latent attention over cached latents: one latent per token, from which all heads are expanded.

A DeepSeek layer expands one latent c of `kv_lora_rank` elements into keys and values of every head. Since
q·(W_UK c) = (q W_UK)·c, and a weighted sum of W_UV c is W_UV of the weighted sum of c, attention can run over the
latents themselves, with one KV head: its keys are [c, rotated part], its values are c, the first part of the keys. The
idea is the absorbed form of the DeepSeek-V2 paper (section 2.1.2), as in vLLM's and SGLang's MLA backends.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

ABSORBED = "slipstream_latent"
"""Attribute of an attention module that passes latents as its keys: its `LatentHeads`."""


class LatentHeads:
    """Maps one layer's queries into the space of latents, and attended latents back into values of its heads."""

    def __init__(self, module: nn.Module) -> None:
        self._expand = module.kv_b_proj
        self._nope = int(module.qk_nope_head_dim)  # type: ignore[arg-type]
        self.v_dim = int(module.v_head_dim)  # type: ignore[arg-type]
        self.rank = int(module.kv_lora_rank)  # type: ignore[arg-type]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """[H, T, rank + rope] from the model's own queries [H, T, nope + rope]."""
        nope, rotated = query.split([self._nope, query.shape[-1] - self._nope], dim=-1)
        return torch.cat((torch.matmul(nope, self._weights()[:, : self._nope]), rotated), dim=-1)

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """[T, H, v_dim] from attended latents, [T, H, rank]."""
        values = torch.matmul(attended.transpose(0, 1), self._weights()[:, self._nope :].transpose(1, 2))
        return values.transpose(0, 1)

    def _weights(self) -> torch.Tensor:
        """[H, nope + v_dim, rank], a view: nothing is stored twice."""
        weight: torch.Tensor = self._expand.weight  # type: ignore[union-attr,assignment]
        return weight.view(-1, self._nope + self.v_dim, self.rank)


def latent_of(module: nn.Module) -> LatentHeads | None:
    """The `LatentHeads` of `module`; None for a layer with keys and values per head."""
    return getattr(module, ABSORBED, None)


def expansions(model: nn.Module) -> set[nn.Module]:
    """The linear layers of `model` that expand latents: attention over these reads their weights as they are."""
    return {module.kv_b_proj for module in model.modules() if _is_latent(module)}  # type: ignore[misc]


def absorb_latents(model: nn.Module) -> bool:
    """Make every recognised layer of `model` pass latents to attention. Returns whether there was one.

    A layer is recognised by its attributes, not by its class name. The self-check finds out whether that was right, and
    `expand_latents` undoes it.
    """
    found = [module for module in model.modules() if _is_latent(module)]
    for module in found:
        setattr(module, ABSORBED, LatentHeads(module))
        module.expand_kv = _keep_latent  # type: ignore[assignment]
    return bool(found)


def expand_latents(model: nn.Module) -> None:
    """Undo `absorb_latents`: the model expands its keys and values by itself again."""
    for module in model.modules():
        if ABSORBED in vars(module):
            delattr(module, ABSORBED)
            del module.expand_kv


def _keep_latent(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for `expand_kv`: keys [1, 1, T, rank + rope] and values, their first `rank` elements."""
    keys = torch.cat((kv_nope, k_rot), dim=-1)
    return keys, keys[..., : kv_nope.shape[-1]]


def _is_latent(module: Any) -> bool:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    parts = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "expand_kv")
    if not all(hasattr(module, name) for name in (*sizes, *parts)):
        return False
    expand = module.kv_b_proj
    # A quantised or adapted projection is more than its weight.
    weight: Any = getattr(expand, "weight", None)
    plain = (type(expand), type(weight)) == (nn.Linear, nn.Parameter) and "forward" not in vars(expand)
    if not plain or expand.bias is not None:
        return False
    height, width = weight.shape
    heads = int(module.qk_nope_head_dim) + int(module.v_head_dim)
    arguments = list(inspect.signature(module.expand_kv).parameters)
    fits = width == module.kv_lora_rank and height % heads == 0
    return arguments == ["kv_nope", "k_rot"] and bool(fits)
