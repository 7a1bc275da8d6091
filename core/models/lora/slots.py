"""Adapters on the device: matrices by slot, and the hooks that add their deltas to the layers' outputs.

One packed batch mixes adapters. The host knows which row uses which adapter, so it sends token places grouped by slot.
How many drafts a row has is known when the step begins: there the places are grouped again, by the slots of the rows.
Every layer then computes two small products per adapter in use, without a host sync and without any work for tokens
that have no adapter. (S-LoRA and Punica gather per token in a kernel; SGLang and vLLM group segments as here.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch

from core.device.recorder import Recorder
from core.device.staging import Staging
from core.invariants import check
from core.memory.companion import Writes
from core.models.lora.packed import Adapter, Delta
from core.models.lora.recorded_hooks import Recordable, RecordedHooks, why_not_recorded
from core.models.lora.shares import Share, cut, shares_of
from core.types.arrays import Ints

LORA = "lora"
"""Name of the companion: the key of `AdapterSlots` on the device and of `LoraWrites` in a batch."""

NONE_SLOT = 0
"""The slot of rows without an adapter, and of padded rows: never written, never in a group."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The tokens of one slot: ascending places in T, int64[n], on the host and on the device."""

    slot: int
    places: Ints
    on_device: torch.Tensor

    def within(self, start: int, end: int) -> torch.Tensor:
        """The places in [start, end), counted from `start`, on the device. Found on the host, so without a sync."""
        first, last = np.searchsorted(self.places, (start, end)).tolist()
        return self.on_device[first:last] - start


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """`adapter` replaces what `slot` held; None empties it and frees its memory."""

    slot: int
    adapter: Adapter | None


@dataclass(frozen=True, slots=True)
class LoraWrites:
    """Adapter part of a step: slots to fill first, in order, then the places in T (int64[n]) of each slot's tokens."""

    slots: tuple[SlotWrite, ...] = ()
    groups: tuple[tuple[int, Ints], ...] = ()
    num_tokens: int = 0
    """T; unused without groups."""
    row_slots: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """int64[B]: the slot of each row, from which the tokens are grouped again where drafts make them more."""


def group_tokens(row_slots: Ints, extend_lens: Ints) -> tuple[tuple[int, Ints], ...]:
    """Token places by slot, for rows with `row_slots` and `extend_lens`, int64[B] each; slot 0 is left out."""
    if not row_slots.any():
        return ()
    slots = np.repeat(row_slots, extend_lens)
    return tuple((int(slot), np.flatnonzero(slots == slot)) for slot in np.unique(row_slots) if slot != NONE_SLOT)


class AdapterSlots:
    """Device side of the adapters over one model; `LateBound`, `Captured`, `Hooking` and `Carried`. Forward stream
    only (law 2).

    A slot's memory is allocated when it is filled and freed when it is emptied, both between two steps, so no step sees
    half an adapter. Hooks are registered only in steps with adapters; the model's modules and weights never change.
    Captured steps have hooks of their own (`RecordedHooks`).
    """

    def __init__(self, model: torch.nn.Module, limits: Recordable | None = None) -> None:
        """`limits`: of adapters whose steps may be captured; None where none may."""
        self.recorder: Recorder | None = None
        self._linears = {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear}
        self._output = getattr(model, "get_output_embeddings", lambda: None)()
        self._shares = shares_of(model)
        self._limits = limits
        self._recorded: RecordedHooks | None = None
        self._filled: dict[int, Mapping[str, Delta]] = {}
        self._targeted: frozenset[str] = frozenset()
        self._hooked: frozenset[str] = frozenset()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._groups: Sequence[_Group] = ()
        self._row_slots: Ints = np.empty(0, np.int64)
        """int64[B]: the slot of each row of the step."""
        self._num_tokens = 0
        self._entering: tuple[LoraWrites, Ints] | None = None
        self._seen: dict[str, int] = {}
        """By layer: how many of the step's tokens it has seen. Linear layers inside recurrent mixers are called for one
        request after another, in the order of the packed row; every other layer sees all tokens at once."""

    def why_not_over(self, model: torch.nn.Module) -> str | None:
        """Why `over` cannot be called with `model`, as a sentence; None if it can."""
        found = {n: m.weight.shape for n, m in model.named_modules() if type(m) is torch.nn.Linear}
        for name, linear in self._linears.items():
            if found.get(name) != linear.weight.shape:
                brings = tuple(found.get(name, ())) or "no such matrix"
                return f"its {name} is {brings}, where adapters have {tuple(linear.weight.shape)}"
        return None

    def over(self, model: torch.nn.Module) -> AdapterSlots:
        """The same adapters over another tree of the same modules. Leaves no hook on the tree of before."""
        self._hook_layers(frozenset())
        moved = AdapterSlots(model, self._limits)
        moved._filled, moved._targeted = self._filled, self._targeted
        return moved

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices that are held, without the gaps between them."""
        deltas = (delta for held in self._filled.values() for delta in held.values())
        return sum(delta.a.nbytes + delta.b.nbytes for delta in deltas)

    @property
    def storage(self) -> Sequence[torch.Tensor]:
        """See `DeviceCompanion`: none, as adapters stay whatever becomes of requests."""
        return ()

    def prepare(self, rows: int, staging: Staging) -> str | None:
        """See `Hooking`."""
        reason = "no adapter is known beforehand" if self._limits is None else why_not_recorded(staging.device)
        if self._shares:
            return "ranks share out the layers that adapters change"
        if reason is None and self._limits is not None:
            # Neither routed experts nor the output matrix are adapted (`checkpoint`), and both would be in the way.
            linears = {n: m for n, m in self._linears.items() if ".experts." not in n and m is not self._output}
            self._recorded = RecordedHooks(linears, self._limits, rows, staging)
            for slot, deltas in self._filled.items():
                self._recorded.fill(slot, deltas)
        return reason

    def recording(self, size: int) -> AbstractContextManager[None]:
        """See `Hooking`."""
        assert self._recorded is not None, "prepare() comes first"
        return self._recorded.recording(size)

    def recorded(self, writes: Writes) -> bool:
        """See `Hooking`. A step that fills slots is not: what it brings has no place before it begins."""
        own = writes.get(LORA)
        assert isinstance(own, LoraWrites), type(own)
        if self._recorded is None or own.slots:
            return False
        return self._recorded.finds([slot for slot, _ in own.groups])

    def apply(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """See `Captured`. The hooks of other steps may stay where they are: a replay runs no module."""
        assert writes is None or isinstance(writes, LoraWrites), type(writes)
        if writes is None:
            return
        self._write(writes.slots, staging.device)
        if writes.groups:
            assert self._recorded is not None and len(writes.row_slots) == len(rows), "recorded() was asked first"
            self._recorded.enter(self._entered(writes), staging)

    def carried(self, writes: object | None, replayed: bool) -> Sequence[np.ndarray]:
        """See `Carried`."""
        if not isinstance(writes, LoraWrites) or not writes.groups:
            return ()
        return [self._entered(writes)] if replayed else [places for _, places in writes.groups]

    def _entered(self, writes: LoraWrites) -> Ints:
        """Where a replay finds the adapters of its rows; the same object each time that a step asks."""
        assert self._recorded is not None, "recorded() was asked first"
        if self._entering is None or self._entering[0] is not writes:
            self._entering = writes, self._recorded.places(writes.row_slots)
        return self._entering[1]

    def look_up(self, rows: torch.Tensor) -> None:
        """See `Captured`: nothing, as rows bring their places."""

    def replayed(self) -> None:
        """See `Captured`: nothing is left to do."""

    def begin(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """Fill slots, and set the step's groups and hooks. A step without writes has no adapters."""
        assert writes is None or isinstance(writes, LoraWrites), type(writes)
        if writes is not None:
            self._write(writes.slots, staging.device)
        groups = writes.groups if writes else ()
        for slot, _ in groups:
            check("adapter_slot_filled", slot in self._filled, slot=slot, filled=sorted(self._filled))
        self._hook_layers(self._targeted if groups else frozenset())
        for name, seen in self._seen.items():
            check("adapter_tokens", seen == self._num_tokens, layer=name, seen=seen, tokens=self._num_tokens)
        self._seen.clear()
        self._group(groups, staging)
        self._num_tokens = writes.num_tokens if writes else 0
        if writes is not None:
            self._row_slots = writes.row_slots

    def measured(self, prefix_lens: Ints, extend_lens: Ints, staging: Staging) -> None:
        """Group the tokens again in a step that computes more than the plan was sure of."""
        # A row never computes fewer than that, so sums that are equal are sums of equal numbers.
        if not self._groups or (tokens := int(extend_lens.sum())) == self._num_tokens:
            return
        self._group(group_tokens(self._row_slots, extend_lens), staging)
        self._num_tokens = tokens

    def _group(self, groups: Sequence[tuple[int, Ints]], staging: Staging) -> None:
        places = staging.upload([places for _, places in groups]) if groups else []
        self._groups = [_Group(*group, place) for group, place in zip(groups, places, strict=True)]

    @torch.inference_mode()
    def _write(self, writes: Sequence[SlotWrite], device: torch.device) -> None:
        if not writes:
            return
        for write in writes:
            assert write.slot > NONE_SLOT, write.slot
            # Freed before the new adapter is allocated, so that both need not fit at once. The allocator reuses memory
            # in the order of this stream, so steps already launched are safe.
            self._filled.pop(write.slot, None)
            if self._recorded is not None:
                self._recorded.empty(write.slot)
            if write.adapter is not None:
                own = cut(write.adapter, self._shares) if self._shares else write.adapter
                deltas = self._filled[write.slot] = own.deltas(device)
                if self._recorded is not None:
                    self._recorded.fill(write.slot, deltas)
        self._targeted = frozenset(name for held in self._filled.values() for name in held)

    def _hook_layers(self, wanted: frozenset[str]) -> None:
        """Have hooks on the `wanted` layers and no others: a hook slows its layer even when it does nothing."""
        if wanted == self._hooked:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = [self._linears[name].register_forward_hook(self._hook(name)) for name in sorted(wanted)]
        self._hooked = wanted

    def _hook(self, name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
        share = self._shares.get(name)

        def add_deltas(_: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            x = args[0].flatten(0, -2)
            start, end = self._advance(name, len(x))
            y = output.reshape(-1, output.shape[-1])
            for group in self._groups:
                delta = self._filled[group.slot].get(name)
                if delta is not None:
                    whole = end - start == self._num_tokens
                    _add(delta, group.on_device if whole else group.within(start, end), x, y, share)
            return y.view(output.shape)

        return add_deltas

    def _advance(self, name: str, count: int) -> tuple[int, int]:
        """(start, end) in T of the next `count` tokens of a layer. A layer that blocks share starts again at 0."""
        start = self._seen.get(name, 0) % self._num_tokens
        check("adapter_tokens", start + count <= self._num_tokens, layer=name, start=start, count=count)
        self._seen[name] = start + count
        return start, start + count


def _add(delta: Delta, places: torch.Tensor, x: torch.Tensor, y: torch.Tensor, share: Share | None) -> None:
    """Add the delta of x[T, in] to y[T, out] at `places`. In place: `y` is a fresh product, read by nothing else."""
    low = torch.nn.functional.linear(x.index_select(0, places), delta.a)
    if share is not None:
        share.join(low)
    y.index_add_(0, places, torch.nn.functional.linear(low, delta.b))
