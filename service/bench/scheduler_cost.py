"""What the scheduler itself costs per step: production scheduler, an executor that answers at once, no clients."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from core.batch.result import Published, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.config import SchedulerConfig
from core.executor.interface import MAX_DEPTH, Executor
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.prefix.registry import build_prefix_cache
from core.scheduler.outputs import StepOutputs
from core.scheduler.scheduler import Emit, Scheduler
from core.types.arrays import Ints
from core.types.request import Req
from core.types.sampling_params import SamplingParams

PAGE_SIZE = 16
"""Tokens per page."""
PROMPT = 8
"""Tokens of a prompt, at least."""
VOCAB = 32_000
WARM_UP = 20


class InstantExecutor:
    """Every submitted step is done at once; its tokens are all `token`."""

    def __init__(self, token: int = 1) -> None:
        self._done: list[StepResult] = []
        self._token = token

    @property
    def in_flight(self) -> int:
        """Steps whose results the scheduler has not taken yet."""
        return len(self._done)

    @property
    def has_room(self) -> bool:
        """Whether fewer than MAX_DEPTH steps are in flight, as with a real device."""
        return len(self._done) < MAX_DEPTH

    def submit(self, batch: ScheduleBatch) -> None:
        """Answer at once, without reading the batch's contents."""
        count = len(batch.sample_indices)
        tokens, nothing = np.full(count, self._token, np.int64), np.zeros(count, np.bool_)
        self._done.append(StepResult(batch.step_id, batch.sample_rows, batch.sample_generations, tokens, nothing))

    def completed(self) -> list[StepResult]:
        """The oldest step, so that one stays in flight as it would under overlap."""
        return [self._done.pop(0)] if self._done else []

    def resolve_seq_lens(self, step_id: int) -> Published | None:
        """None: no step has drafts."""
        return None

    def stop(self) -> None:
        """No-op: nothing runs."""


def scheduler_cost(running: int, steps: int = 200) -> float:
    """Median seconds of one `Scheduler.step` in steady decode with `running` requests."""
    scheduler = new_scheduler(running, WARM_UP + steps + PROMPT)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for index in range(running):
        prompt = np.array([index % VOCAB] * PROMPT, np.int64)
        scheduler.intake.add(Req(str(index), 0, prompt, params, 0, WARM_UP + steps))
    now, times = 0.0, []
    for _ in range(WARM_UP + steps - 5):
        now += 0.005
        began = time.thread_time()
        scheduler.step(now)
        times.append(time.thread_time() - began)
    assert len(scheduler.running) == running, "measured while everybody decodes"
    return statistics.median(times[WARM_UP:])


def new_scheduler(
    running: int, tokens: int, executor: Executor | None = None, emit: Emit | None = None, policy: str = "fcfs"
) -> Scheduler:
    """The production scheduler with room for `running` requests of `tokens` tokens each."""
    allocator = PagedKVAllocator(running * (tokens // PAGE_SIZE + 2), PAGE_SIZE)
    memory = RequestMemory(RowAllocator(running), allocator, build_prefix_cache("radix", PAGE_SIZE), tokens + PAGE_SIZE)
    return Scheduler(
        SchedulerConfig(chunked_prefill_size=running * tokens, max_queued_requests=running, policy=policy),
        memory,
        executor or InstantExecutor(),
        emit or _drop,
        max_len=tokens + PAGE_SIZE,
        vocab_size=VOCAB,
        eos_ids=(2,),
        pin=_pin,
    )


def _drop(outputs: StepOutputs, now: float) -> None:
    """Drop the outputs: this benchmark has no clients."""


def _pin(parts: list[Ints]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))
