"""Hooks that are recorded into captured decode steps: each row's update is found by the row's place, at the replay.

The hooks of other steps (`slots`) run one product per adapter in use, over the tokens that the host has grouped: which
and how many changes from step to step. Here a layer does the same launches in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch

from core.device.staging import Staging
from core.models.lora.addresses import Addresses
from core.models.lora.packed import Delta
from core.types.arrays import Ints

Hook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Recordable:
    """What adapters may be, as far as captured steps must know it beforehand."""

    dtype: torch.dtype
    """Of their matrices."""
    max_rank: int
    modules: frozenset[str] | None = None
    """Those that they change; None where any may come while serving."""


def why_not_recorded(device: torch.device) -> str | None:
    """Why updates cannot be computed by row on `device`, as the end of a sentence; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    runs = device.type == "cuda" or triton.knobs.runtime.interpret
    return None if runs else f"Triton compiles for GPUs, not for {device.type}"


class RecordedHooks:
    """Over the linear layers `linears` of one model, for steps of up to `rows` rows. Forward stream only (law 2)."""

    def __init__(self, linears: Mapping[str, torch.nn.Linear], limits: Recordable, rows: int, staging: Staging) -> None:
        wanted = linears if limits.modules is None else limits.modules
        # A layer with weights of another type than the model's takes no adapter in any step.
        self._linears = {n: m for n, m in linears.items() if n in wanted and m.weight.dtype == limits.dtype}
        self._limits = limits
        self.addresses = Addresses(sorted(self._linears), limits.dtype, staging.device)
        self._staging = staging
        self._places = torch.zeros(rows, dtype=torch.int64, device=staging.device)
        self._missed: set[str] = set()
        """Layers that were not called with one token of each row, so that no graph computes their updates."""
        self._changed: dict[int, frozenset[str]] = {}
        """Slot -> the layers that its adapter changes."""

    def fill(self, slot: int, deltas: Mapping[str, Delta]) -> None:
        """`slot` holds `deltas` from the next step on."""
        self._changed[slot] = frozenset(deltas)
        self.addresses.fill(slot, deltas, self._staging)

    def empty(self, slot: int) -> None:
        """No step names `slot` from now on."""
        self._changed.pop(slot, None)
        self.addresses.empty(slot)

    def finds(self, slots: Sequence[int]) -> bool:
        """Whether replays compute the updates of all `slots`."""
        return all(self.addresses.place(slot) and self._missed.isdisjoint(self._changed[slot]) for slot in slots)

    def places(self, row_slots: Ints) -> Ints:
        """What `enter` takes for rows that have adapters in `row_slots`, int64[B]; padding behind them has none."""
        found, row_of = np.unique(row_slots, return_inverse=True)
        places = np.zeros(len(self._places), np.int64)
        places[: len(row_slots)] = np.array([self.addresses.place(slot) for slot in found.tolist()], np.int64)[row_of]
        return places

    def enter(self, places: Ints, staging: Staging) -> None:
        """The rows of the replay that follows have the adapters at `places`."""
        self._places.copy_(staging.upload([places])[0])

    @contextmanager
    def recording(self, size: int) -> Iterator[None]:
        """Within, the layers have the hooks of a decode step of `size` rows."""
        places = self._places[:size]
        handles = [linear.register_forward_hook(self._hook(name, places)) for name, linear in self._linears.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, places: torch.Tensor) -> Hook:
        from core.models.lora.row_deltas import add_row_deltas

        table, origin, ranks = self.addresses.of(name), self.addresses.origin, self._limits.max_rank

        def add_deltas(_: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            x = args[0].flatten(0, -2)
            if len(x) != len(places) or x.dtype != origin.dtype:
                self._missed.add(name)
                return None
            y = output.reshape(-1, output.shape[-1])
            add_row_deltas(y, x if x.stride(-1) == 1 else x.contiguous(), origin, table, places, ranks)
            return y.view(output.shape)

        return add_deltas
