"""Adapters on the device: per linear layer a stack of A and of B, and the hooks that add a row's delta.

One packed batch mixes adapters. The host knows which rows use which, so it sends token places grouped by slot, and
every layer does two small products per adapter in use: no host sync, and no work at all for tokens without one. (S-LoRA
and Punica gather per token in a kernel; SGLang and vLLM group segments as here.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.device.recorder import Recorder
from core.device.staging import Staging
from core.models.lora.checkpoint import Adapter
from core.types.arrays import Ints

LORA = "lora"
"""Name of the companion: the key of `AdapterSlots` on the device and of `LoraWrites` in a batch."""

NONE_SLOT = 0
"""No adapter, and what padded rows have: never written, never in a group."""


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """`adapter` replaces what `slot` held; None empties it."""

    slot: int
    adapter: Adapter | None


@dataclass(frozen=True, slots=True)
class LoraWrites:
    """What a step brings: slots to fill first, then the places in T (int64[n]) of each slot's tokens."""

    slots: tuple[SlotWrite, ...] = ()
    groups: tuple[tuple[int, Ints], ...] = ()


def group_tokens(row_slots: Ints, extend_lens: Ints) -> tuple[tuple[int, Ints], ...]:
    """Token places by slot, for rows with `row_slots` and `extend_lens`, int64[B] each; slot 0 is left out."""
    if not row_slots.any():
        return ()
    slots = np.repeat(row_slots, extend_lens)
    return tuple((int(slot), np.flatnonzero(slots == slot)) for slot in np.unique(row_slots) if slot != NONE_SLOT)


class _Stack:
    """Matrices of one linear layer: `a` [slots + 1, max_rank, in], `b` [slots + 1, out, max_rank]."""

    def __init__(self, linear: torch.nn.Linear, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        # A packed layer may have its weight under another name.
        device = next(linear.parameters()).device
        self.a = torch.zeros(num_slots + 1, max_rank, linear.in_features, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots + 1, linear.out_features, max_rank, dtype=dtype, device=device)
        self.ranks = [0] * (num_slots + 1)
        """Rank by slot; 0 where the slot's adapter leaves this layer alone."""


class AdapterSlots:
    """Device side of `num_slots` adapters over one model; a `DeviceCompanion`. Forward stream only (law 2).

    Memory is taken per layer when the first adapter that targets it arrives. Hooks are on in steps
    that have adapters; the model's modules and weights stay as they are.
    """

    def __init__(self, model: torch.nn.Module, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        self.recorder: Recorder | None = None
        self.num_slots, self.max_rank, self._dtype = num_slots, max_rank, dtype
        self._linears = {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear}
        self._stacks: dict[str, _Stack] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._groups: Sequence[tuple[int, torch.Tensor]] = ()

    def begin(self, rows: torch.Tensor, writes: LoraWrites | None, staging: Staging) -> None:
        """Fill slots, and know the step's groups. A step without writes has no adapters."""
        for write in writes.slots if writes else ():
            self._write(write)
        groups = writes.groups if writes else ()
        if bool(groups) != bool(self._handles):
            self._hook_layers(bool(groups))
        places = staging.upload([places for _, places in groups]) if groups else []
        self._groups = [(slot, place) for (slot, _), place in zip(groups, places, strict=True)]

    def _hook_layers(self, wanted: bool) -> None:
        """Hooks are there in steps with adapters only: `Module.__call__` is slower for a hook that does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = [
            self._linears[name].register_forward_hook(self._hook(stack))
            for name, stack in (self._stacks.items() if wanted else ())
        ]

    @torch.inference_mode()
    def _write(self, write: SlotWrite) -> None:
        assert 0 < write.slot <= self.num_slots, write.slot
        for stack in self._stacks.values():
            stack.ranks[write.slot] = 0
        for name, delta in (write.adapter.deltas if write.adapter else {}).items():
            stack = self._stack(name)
            rank = delta.a.shape[0]
            assert rank <= self.max_rank, rank
            stack.a[write.slot, :rank].copy_(delta.a, non_blocking=True)
            stack.b[write.slot, :, :rank].copy_(delta.b, non_blocking=True)
            stack.ranks[write.slot] = rank

    def _stack(self, name: str) -> _Stack:
        if name not in self._stacks:
            stack = self._stacks[name] = _Stack(self._linears[name], self.num_slots, self.max_rank, self._dtype)
            if self._handles:
                self._handles.append(self._linears[name].register_forward_hook(self._hook(stack)))
        return self._stacks[name]

    def _hook(self, stack: _Stack) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
        def add_deltas(_: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            _add(stack, self._groups, args[0].flatten(0, -2), output.view(-1, output.shape[-1]))
            return output

        return add_deltas


def _add(stack: _Stack, groups: Sequence[tuple[int, torch.Tensor]], x: torch.Tensor, y: torch.Tensor) -> None:
    """y[T, out] += delta of x[T, in], in place: `y` is a fresh product that nobody else has seen."""
    for slot, places in groups:
        rank = stack.ranks[slot]
        if rank:
            low = torch.nn.functional.linear(x.index_select(0, places), stack.a[slot, :rank])
            y.index_add_(0, places, torch.nn.functional.linear(low, stack.b[slot, :, :rank]))
