"""Rank 0 of a pipeline: it begins a step, sends it round the other ranks, and ends it when it has come back.

SGLang has the tokens of the last rank stashed on rank 0, so that later mixed steps find them there (`pp_outputs`). Here
hidden states come back, and rank 0 samples: its FutureMap is as in an engine of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.result import Published
from core.batch.schedule_batch import ScheduleBatch
from core.device.event import Event
from core.distributed.leader import plain
from core.distributed.wire import encode
from core.distributed.world import World
from core.executor.computed import Begun, Computed
from core.executor.device_state import DeviceState
from core.executor.launched_step import LaunchedStep
from core.executor.step import StepRunner
from core.executor.step_inputs import carried
from core.memory.host_moves import CopyOut
from core.models.stages.staged_model import FirstStage


@dataclass(frozen=True, slots=True)
class Away:
    """A step that is on its way round the other ranks."""

    begun: Begun
    coming: Any
    """What `FirstStage.end` takes."""


class PipelineLeader(StepRunner):
    """A `StepRunner` whose steps have two halves. Between them other steps may begin, of rows that this one has not."""

    def __init__(self, state: DeviceState, world: World) -> None:
        """All ranks make theirs at once: steps that are run before the first one go round too."""
        assert isinstance(state.model, FirstStage), type(state.model)
        self._first: FirstStage = state.model
        super().__init__(state)
        self._world = world
        self._coming: Any = None

    @property
    def stages(self) -> int:
        """Ranks in the pipeline."""
        return self._world.size

    @torch.inference_mode()
    def begin(self, batch: ScheduleBatch, computing: Callable[[], None] = lambda: None) -> Away:
        """Launch this rank's part of a step; `computing` as in `launch`. Waits for no other rank.

        Raises RuntimeError once a rank is gone: no step can be trusted any more.
        """
        # Before it is launched, which consumes what is staged.
        self._world.send(encode(plain(batch)))
        begun = self._begin(batch, computing)
        coming, self._coming = self._coming, None
        return Away(begun, coming)

    @torch.inference_mode()
    def end(self, away: Away, published: Callable[[Published], None] = lambda _: None) -> LaunchedStep:
        """Wait for what has come back of a step, and launch what is made of it. Steps end in the order they began.

        Raises RuntimeError as `begin` does.
        """
        begun = away.begun
        batch, inputs = begun.batch, begun.done.inputs
        assert isinstance(inputs, ForwardBatch), "steps of a pipeline are not replayed"
        with self._state.streams.on_forward():
            logits = self._first.end(inputs, away.coming)
            done = self._read(batch, inputs, logits, None, begun.done.sampled)
        return self._end(replace(begun, done=done), published)

    def launch(
        self,
        batch: ScheduleBatch,
        computing: Callable[[], None] = lambda: None,
        published: Callable[[Published], None] = lambda _: None,
    ) -> LaunchedStep:
        """See `StepRunner`: both halves, one behind the other. Raises RuntimeError as `begin` does."""
        return self.end(self.begin(batch, computing), published)

    def copy_out(self, out: CopyOut) -> Event:
        """See `StepRunner`: each rank copies its own layers."""
        self._world.send(encode(out))
        return super().copy_out(out)

    def _compute(self, batch: ScheduleBatch, computing: Callable[[], None]) -> Computed:
        along = carried(batch, self._state, self._sampling)
        inputs, _, sampled = self._prepare(batch, along)
        computing()
        self._coming = self._first.begin(inputs)
        return Computed(inputs, _NOT_YET, sampled=sampled)


_NOT_YET = torch.empty(0)
"""Stands for the logits of a step that is away."""
