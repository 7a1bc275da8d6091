"""Forward and copy streams, and events, with one API on every device.

On the CPU `torch.get_device_module("cpu")` gives null streams and events with the same methods, so the code that needs
ordering is the same code that runs in tests without an accelerator (law 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch

from core.device.event import Event
from core.device.fetch import fetch_together
from core.device.graphs import CudaGraphs, GraphMaker
from core.device.recorder import RecordedEvent, Recorder, on_lane
from core.device.timer import Mark, mark
from core.errors import ConfigError
from core.invariants import check

MAX_STREAM_DRAWS = 64
"""Draws before giving up, as in SGLang: PyTorch hands out 32 streams in turn, so two draws can be the same one."""

FORWARD, COPY, TRANSFER = "forward stream", "copy stream", "transfer stream"
"""Names of the streams for a `Recorder`."""


class DeviceStreams:
    """The streams of one engine: `forward` runs every write of device state, `copy` brings results to the host,
    `transfer` moves what is leased.

    On an accelerator all of them and the default stream are distinct: else the copy would silently run behind the next
    forward pass, and nothing would overlap (bug class D34). `recorder`, if any, is told what is submitted; code that
    writes device state finds it here.
    """

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        self.device = device
        self.recorder = recorder
        self._module: Any = torch.get_device_module(device)
        self.forward: Any = self._module.Stream()
        self.copy: Any = self._draw_distinct(self.forward)

    @cached_property
    def transfer(self) -> Any:
        """Made when it is first asked for: an engine that moves nothing has no such stream."""
        return self._draw_distinct(self.forward, self.copy)

    def _draw_distinct(self, *others: Any) -> Any:
        stream = self._module.Stream()
        if self.device.type == "cpu":
            return stream
        taken = {*map(self._handle, others), self._handle(self._module.default_stream())}
        for _ in range(MAX_STREAM_DRAWS):
            if self._handle(stream) not in taken:
                break
            stream = self._module.Stream()
        handles = {*taken, self._handle(stream)}
        check("streams_distinct", len(handles) == len(others) + 2, device=str(self.device), handles=sorted(handles))
        return stream

    @staticmethod
    def _handle(stream: Any) -> int:
        return int(getattr(stream, "cuda_stream", id(stream)))

    @property
    def at_once(self) -> bool:
        """Whether work is done when the call that submits it returns: so it is on the CPU."""
        return self.device.type == "cpu"

    def new_event(self) -> Event:
        """A fresh event; one per step and purpose, never recorded twice."""
        event: Event = self._module.Event()
        if self.recorder is None:
            return event
        lanes = {self.forward: FORWARD, self.copy: COPY}
        if "transfer" in self.__dict__:
            lanes[self.transfer] = TRANSFER
        return RecordedEvent(event, self.recorder, lanes)

    def mark(self) -> Mark:
        """A point in device time on the current stream, for measuring busy and idle seconds."""
        return mark(self.device)

    def new_graphs(self) -> GraphMaker | None:
        """A maker of graphs on the forward stream, with its own pool of memory; None on devices without graphs."""
        return CudaGraphs(self.forward) if self.device.type == "cuda" else None

    def on_forward(self) -> AbstractContextManager[Any]:
        """Context in which new work goes to the forward stream."""
        return self._on(self.forward, FORWARD)

    def on_copy(self) -> AbstractContextManager[Any]:
        """Context in which new work goes to the copy stream."""
        return self._on(self.copy, COPY)

    def on_transfer(self) -> AbstractContextManager[Any]:
        """Context in which new work goes to the transfer stream."""
        return self._on(self.transfer, TRANSFER)

    def _on(self, stream: Any, lane: str) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context if self.recorder is None else on_lane(self.recorder, lane, context)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Host tensors that hold the values of `tensors` once the current stream has got to this point.

        One transfer for all of them. Pinned, because a copy to ordinary memory would block. On the CPU they are the
        `tensors` themselves, which must not be written again.
        """
        if self.device.type == "cpu":
            return list(tensors)
        return fetch_together(tensors, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def synchronize(self) -> None:
        """Block until the device is idle; for start-up and shutdown only."""
        self._module.synchronize()
        if self.recorder is not None:
            self.recorder.drained()


def resolve_device(name: str) -> torch.device:
    """The device `name`; `auto` takes CUDA if PyTorch sees it. Raises ConfigError for `cuda` where there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device is cuda, but PyTorch sees no CUDA device; use --device cpu, or check the driver")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")
