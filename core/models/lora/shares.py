"""Which part of an adapter each rank needs, where ranks share out the layers that it changes.

A layer of which a rank computes some outputs needs the rows of B of these, and all of A. One of which it has some
inputs needs the columns of A of those: its product with them is a part of A x, and all ranks add up theirs, a few
numbers a token, before B. (S-LoRA shares its matrices in this way; vLLM's `fully_sharded_loras` too.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from core.models.lora.packed import Adapter, Delta, pack

OUTPUTS, INPUTS = 0, 1
"""Dimensions of the weight of a linear layer."""
STYLES = {"colwise": OUTPUTS, "rowwise": INPUTS}
"""Ways in which `transformers` shares out a layer -> the dimension. In others, inputs or outputs are whole, or several
layers are packed into one."""


@dataclass(frozen=True, slots=True)
class Share:
    """Outputs or inputs [first, last) of a layer, by `dim`; `group`: the ranks that have the others."""

    dim: int
    first: int
    last: int
    group: dist.ProcessGroup

    def cut(self, delta: Delta) -> Delta:
        """What this rank needs of `delta`."""
        if self.dim == OUTPUTS:
            return Delta(delta.a, delta.b[self.first : self.last])
        return Delta(delta.a[:, self.first : self.last], delta.b)

    def join(self, low: torch.Tensor) -> None:
        """Make `low`, x @ A.T of the inputs of this rank, that of all inputs. In place; all ranks call it at once."""
        if self.dim == INPUTS:
            dist.all_reduce(low, group=self.group)


def shares_of(model: torch.nn.Module) -> dict[str, Share]:
    """By name: the linear layers of which this rank has a part. Empty where it has all of the model."""
    plan = getattr(model, "_tp_plan", None) or {}
    found = {}
    for name, module in model.named_modules():
        # Packed weights have other names.
        weight = getattr(module, "weight", None)
        if type(module) is torch.nn.Linear and isinstance(weight, DTensor):
            dim = STYLES.get(_style(name, plan))
            if dim is not None and isinstance(placed := weight.placements[0], Shard):
                assert placed.dim % 2 == dim, (name, placed)
                found[name] = _share(weight, dim)
    return found


def why_not_shared(name: str, module: torch.nn.Module, model: torch.nn.Module) -> str:
    """Why ranks cannot adapt the layer `name` of `model`, as the end of a sentence; empty where they can."""
    style = _style(name, getattr(model, "_tp_plan", None) or {})
    shared = isinstance(getattr(module, "weight", None), DTensor)
    return f"which ranks share out as {style!r}, and is not adapted" if shared and style not in STYLES else ""


def cut(adapter: Adapter, shares: Mapping[str, Share]) -> Adapter:
    """What this rank needs of `adapter`."""
    deltas = {name: place.view(adapter.buffer) for name, place in adapter.places.items()}
    own = {name: shares[name].cut(delta) if name in shares else delta for name, delta in deltas.items()}
    return pack(own, pin=adapter.buffer.is_pinned())


def _style(name: str, plan: Mapping[str, str]) -> str:
    """Of the layer `name`; plans have a star for each number between dots."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), "")


def _share(weight: DTensor, dim: int) -> Share:
    mesh, whole = weight.device_mesh, weight.shape[dim]
    # As `torch.chunk` cuts: the last one may be shorter, or empty.
    size = -(-whole // mesh.size())
    first = min(mesh.get_local_rank() * size, whole)
    last = min(first + size, whole)
    assert weight.to_local().shape[dim] == last - first, (weight.shape, dim, first, last)
    return Share(dim, first, last, mesh.get_group())
