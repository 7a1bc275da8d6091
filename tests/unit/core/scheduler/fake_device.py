"""A device that takes exactly as long as a test says, below the production step: marks read a clock that tests move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.device.streams import DeviceStreams
from core.engine.build import assemble
from core.memory.companion import DeviceCompanion
from core.memory.kv_pool import KVPool
from core.models.base import NO_COMPANIONS
from core.models.bundled import bundled_model_dir
from core.scheduler.outputs import StepOutputs
from core.scheduler.scheduler import Scheduler
from core.text.tokenizer import Tokenizer
from tests.proofs.happens_before.hash_model import HashModel

VOCAB, CONTEXT = 97, 64


@dataclass
class Clock:
    """Device time in seconds."""

    now: float = 0.0


@dataclass(frozen=True)
class ClockMark:
    """A point in that time; see `core.device.timer.Mark`."""

    passed: float
    at: float | None = None

    def seconds_since(self, earlier: ClockMark) -> float:
        """Seconds of the clock."""
        return self.passed - earlier.passed


class ClockedStreams(DeviceStreams):
    """The production streams of the CPU; their marks show `clock`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(torch.device("cpu"))
        self._clock = clock

    def mark(self) -> ClockMark:  # type: ignore[override]
        """Now."""
        return ClockMark(self._clock.now)


class ClockedModel:
    """A model whose forward pass takes `seconds` of the clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._inner = HashModel(VOCAB, CONTEXT)
        self._clock = clock
        self.spec, self.seconds = self._inner.spec, seconds

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """See `HashModel`."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """The logits, `seconds` later."""
        self._clock.now += self.seconds
        return self._inner.forward(batch)


class ClockedEngine:
    """The production scheduler over the production step, one step at a time; only model and marks are fakes."""

    def __init__(self, busy: float) -> None:
        self.clock = Clock()
        self.model = ClockedModel(self.clock, busy)
        config = EngineConfig(
            model=ModelConfig("clocked"),
            memory=MemoryConfig(page_size=4, max_running_requests=4, max_total_tokens=256),
            scheduler=SchedulerConfig(),
            executor=ExecutorConfig(device="cpu", overlap=False),
        )
        tokenizer = Tokenizer.load(str(bundled_model_dir()))
        built = assemble(config, self.model, tokenizer, ClockedStreams(self.clock))  # type: ignore[arg-type]
        self.scheduler: Scheduler = built.new_scheduler(built.new_executor(_nobody), _ignore)

    def serve(self, host: float) -> None:
        """Step until nothing is left to do; before each step the host spends `host` seconds."""
        while self.scheduler.has_work:
            self.clock.now += host
            self.scheduler.step(self.clock.now)


def _nobody() -> None:
    """There is no loop to wake."""


def _ignore(outputs: StepOutputs, now: float) -> None:
    """There is no client."""
