"""An emulated accelerator: a timeline that steps occupy one after another, asynchronously, without computing anything.

Everything else is the production path: scheduler, forward thread, FutureMap, sampler, completion. `forward` reserves
the next `step_seconds` of the timeline and returns at once, as a kernel launch does. An event is passed when the
timeline has reached the point at which it was recorded. Waiting for one sleeps without the GIL. Idle time is therefore
the time that a real device would have waited for the host, whatever this machine's cores can compute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.device.event import Event
from core.device.streams import DeviceStreams
from core.device.timer import Mark
from core.memory.companion import DeviceCompanion
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.models.base import NO_COMPANIONS, ModelSpec
from core.types.arrays import Ints

MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407
"""Those of Knuth's MMIX linear congruential generator."""


@dataclass(slots=True)
class Timeline:
    """The times at which the emulated device is busy. The forward thread writes it, any thread may read it."""

    step_seconds: float
    """Seconds that one step takes."""
    busy_until: float = 0.0
    """The end of the last step queued, in `time.monotonic` seconds; 0 before the first."""
    busy: float = 0.0
    """Seconds of all steps since the last reset."""
    idle: float = 0.0
    """Seconds without a step since the last reset."""
    steps: int = 0
    leads: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    """For the newest 4096 steps, the seconds of work that the device still had when the step was queued."""

    def occupy(self) -> None:
        """Queue one step after those that are there. If none was left, the time since the last end counts as idle."""
        now = time.monotonic()
        if self.busy_until:
            self.idle += max(0.0, now - self.busy_until)
            self.leads.append(max(0.0, self.busy_until - now))
        self.busy_until = max(now, self.busy_until) + self.step_seconds
        self.busy += self.step_seconds
        self.steps += 1

    def reset(self) -> None:
        """Set the figures to zero, after a warm-up. Queued steps stay."""
        self.busy = self.idle = 0.0
        self.steps = 0
        self.leads.clear()

    @property
    def idle_share(self) -> float:
        """Idle seconds over all seconds since the last reset."""
        return self.idle / max(self.idle + self.busy, 1e-9)


class TimelineMark:
    """The end of the steps that were queued when the mark was made."""

    def __init__(self, timeline: Timeline) -> None:
        self.at = max(timeline.busy_until, time.monotonic())

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of device time from `earlier` to this mark."""
        assert isinstance(earlier, TimelineMark)
        return self.at - earlier.at


class TimelineEvent:
    """Passed when the timeline reaches the instant of its recording."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the end of the steps that are queued now."""
        self._at = self._timeline.busy_until

    def query(self) -> bool:
        """Whether the recorded end was reached."""
        return time.monotonic() >= self._at

    def synchronize(self) -> None:
        """Sleep until the recorded end, unless that was reached; `time.sleep` releases the GIL."""
        if (left := self._at - time.monotonic()) > 0:
            time.sleep(left)

    def wait(self, stream: Any = None) -> None:
        """No-op: the streams of the emulation share one timeline, which keeps their order."""


class EmulatedStreams(DeviceStreams):
    """CPU streams whose events and marks follow the timeline."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(torch.device("cpu"))
        self.timeline = timeline

    def new_event(self) -> Event:
        """An event on the timeline."""
        return TimelineEvent(self.timeline)

    def mark(self) -> Mark:
        """A mark on the timeline."""
        return TimelineMark(self.timeline)


class EmulatedModel:
    """A model whose next token is a hash of the input token and its position.

    So an output shows whether its stream got a token of another one.
    """

    def __init__(self, timeline: Timeline, vocab_size: int, context_length: int = 4096) -> None:
        self.timeline = timeline
        self.spec = ModelSpec(
            name="emulated",
            architecture="Emulated",
            vocab_size=vocab_size,
            context_length=context_length,
            dtype=torch.float32,
            kv_layers=(KVLayerSpec(0, 1, 1, 1),),
        )

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """No-op: this model reads no KV."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size], 1 at the next token and 0 elsewhere."""
        self.timeline.occupy()
        # In numpy: what takes the device no time must take the host as little.
        last = batch.last_indices.numpy()
        chosen = _mix(batch.input_ids.numpy()[last], batch.positions.numpy()[last]) % self.spec.vocab_size
        logits = np.zeros((len(chosen), self.spec.vocab_size), np.float32)
        logits[np.arange(len(chosen)), chosen] = 1.0
        return torch.from_numpy(logits)


def expected_output(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that a correct engine streams for `prompt`."""
    output, token = [], prompt[-1]
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        token = _mix_one(token, position) % vocab_size
        output.append(token)
    return output


def _mix_one(token: int, position: int) -> int:
    # `_mix` for one pair; of the 64 bits that wrap around there, only bits 33 to 62 are used.
    return (((token * MULTIPLIER + position * INCREMENT + 1) * MULTIPLIER) >> 33) & 0x3FFFFFFF


def _mix(tokens: Ints, positions: Ints) -> Ints:
    # int64 wraps around; the sign bit is dropped so that the remainder is a token id.
    mixed: Ints = (tokens * MULTIPLIER + positions * INCREMENT + 1) * MULTIPLIER
    return (mixed >> 33) & 0x3FFFFFFF
