"""An engine over an emulated device that a test can hold, break and question."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch

from core.batch.forward_batch import ForwardBatch
from core.config import EngineConfig
from core.engine.api import EngineState
from core.engine.async_engine import AsyncEngine
from core.engine.build import assemble
from core.text.tokenizer import Tokenizer
from core.types.control import Activity
from core.types.io import Delta, Finished, GenerateRequest, Started
from core.types.sampling_params import SamplingParams
from service.bench.emulated import EmulatedModel, EmulatedStreams, Timeline
from tests.support.engines import started
from tests.support.fakes.emulated_engine import emulated_config


class HookedModel(EmulatedModel):
    """Calls `hook(step, logits, batch)` before it answers; the step counts from 1."""

    def __init__(self, tokenizer: Tokenizer, step_seconds: float = 0.001) -> None:
        super().__init__(Timeline(step_seconds), tokenizer.vocab_size)
        self.step = 0
        self.hook: Callable[[int, torch.Tensor, ForwardBatch], None] = lambda *_: None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.step += 1
        logits = super().forward(batch)
        self.hook(self.step, logits, batch)
        return logits


@asynccontextmanager
async def running(
    tokenizer: Tokenizer, model: HookedModel | None = None, /, **changes: Any
) -> AsyncIterator[AsyncEngine]:
    """A started engine; `changes` replace fields of the engine's config or of its floors."""
    model = model or HookedModel(tokenizer)
    config = _changed(emulated_config(rows=8, max_total_tokens=2048), changes)
    async with started(assemble(config, model, tokenizer, EmulatedStreams(model.timeline))) as engine:
        yield engine


def _changed(config: EngineConfig, changes: dict[str, Any]) -> EngineConfig:
    for name, value in changes.items():
        for floor in ("memory", "scheduler", "executor"):
            part = getattr(config, floor)
            if name in {field.name for field in dataclasses.fields(part)}:
                config = dataclasses.replace(config, **{floor: dataclasses.replace(part, **{name: value})})
                break
        else:
            config = dataclasses.replace(config, **{name: value})
    return config


def ask(
    prompt: tuple[int, ...] = (5, 6, 7), *, tokens: int = 8, want_text: bool = False, **rest: Any
) -> GenerateRequest:
    own = {field.name for field in dataclasses.fields(GenerateRequest)}
    sampling = {key: rest.pop(key) for key in list(rest) if key not in own}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling})
    return GenerateRequest(token_ids=prompt, sampling=params, want_text=want_text, **rest)


async def read(engine: AsyncEngine, request: GenerateRequest) -> tuple[list[int], str, Finished]:
    """Ids, text and terminal of a request with one output; checks the order of events on the way."""
    ids: list[int] = []
    text, end = "", None
    events = [event async for event in await engine.generate(request)]
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    for event in events[1:]:
        if isinstance(event, Delta):
            assert end is None and event.position == len(ids)
            ids += event.token_ids
            text += event.text
        else:
            assert isinstance(event, Finished) and end is None
            end = event
    assert end is not None and end.usage.completion_tokens == len(ids)
    return ids, text, end


async def last(stream: Any) -> Finished:
    events = [event async for event in stream]
    assert isinstance(events[-1], Finished)
    return events[-1]


def assert_opened(gate: threading.Event) -> None:
    """Hold the device until the test lets it go."""
    assert gate.wait(30)


def assert_serves(engine: AsyncEngine, activity: Activity = Activity.SERVING) -> None:
    assert engine.state is EngineState.READY and engine.stats.activity is activity
