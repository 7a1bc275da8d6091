"""The whole loop step in steady decode: take results, plan, build, submit, publish, hand tokens to streams, read them.

Production scheduler, output processor, streams and detokenisers run behind an executor that answers at once. The parts
are timed where the scheduler calls the executor and `emit`, so nothing is added inside it. Times are those of the
thread, so that other work of this machine does not count; reading that clock nine times adds 2 µs to each step.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.engine.streams.output_processor import OutputProcessor
from core.engine.streams.pending_output import PendingOutput
from core.engine.streams.reader_turns import Turnstile
from core.engine.streams.token_stream import TokenStream
from core.models.bundled import bundled_model_dir
from core.scheduler.outputs import StepOutputs
from core.text.detokenizer import IncrementalDetokenizer
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.io import Started
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from service.bench.scheduler_cost import PAGE_SIZE, PROMPT, InstantExecutor, new_scheduler

PARTS = ("take", "plan", "submit", "publish", "hand over", "read")
"""Take results and commands; plan and build the batch; submit; publish statistics; hand over to streams; readers."""

TOKEN = 300
"""The token that every request samples. Python keeps the integers up to 256, so a smaller one would hide the cost of
integers."""

SETTLE = 2 * PAGE_SIZE
"""Steps before the first that counts: all requests are admitted, and each has grown a page."""


class TimedExecutor(InstantExecutor):
    """Calls `mark` where one part of a step ends and the next begins."""

    def __init__(self, mark: Callable[[str], None]) -> None:
        super().__init__(TOKEN)
        self._mark = mark

    @property
    def has_room(self) -> bool:
        """Whether a step may be submitted. The scheduler asks before it plans, and again after it submitted."""
        self._mark("publish" if self.in_flight >= 2 else "take")
        return super().has_room

    def submit(self, batch: ScheduleBatch) -> None:
        """Submit as `InstantExecutor` does, and mark the parts before and after."""
        self._mark("plan")
        super().submit(batch)
        self._mark("submit")


@dataclass(slots=True)
class StepParts:
    """Mean seconds of one step by part, in the order of `PARTS`."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def step(self) -> float:
        """Seconds of all parts of the loop, without the readers' own part."""
        return sum(self.seconds.values()) - self.seconds["read"]


class LoopStep:
    """`running` requests that can decode for `steps` steps, each with a stream. `text`: readers want text.

    `read` off: the streams stay unread (their bound is far away), which shows the hand-over alone. `spare`: rows left
    for other requests.
    """

    def __init__(self, running: int, steps: int, *, text: bool = False, read: bool = True, spare: int = 0) -> None:
        self._now = self._since = 0.0
        self._parts = StepParts()
        self._read = read
        self._count_blocks = False
        self._handed_over = 0
        """Blocks of memory that Python held when the last step's tokens were handed over."""
        tokens = SETTLE + steps + 8
        self.scheduler = new_scheduler(running + spare, tokens + 2 * PAGE_SIZE, TimedExecutor(self._mark), self._emit)
        self._outputs = OutputProcessor(self.scheduler.intake, lambda: None, tokens, lambda _: None, TextFailures())
        self.streams = [self._stream(index, tokens, text) for index in range(running)]
        for _ in range(SETTLE):
            self.step()
        assert len(self.scheduler.running) == running, "everybody decodes"

    def step(self) -> None:
        """Run one step, and with `read` on read every event that it made."""
        self._now += 0.005
        self._since = time.thread_time()
        self.scheduler.step(self._now)
        self._mark("publish")
        if self._read:
            for stream in self.streams:
                while stream.poll() is not None:
                    pass
        self._mark("read")

    def measure(self, steps: int) -> StepParts:
        """Mean seconds by part over `steps` steps, garbage collection included."""
        self._parts = StepParts()
        for _ in range(steps):
            self.step()
        self._parts.seconds = {name: total / steps for name, total in self._parts.seconds.items()}
        return self._parts

    def churn(self, steps: int) -> tuple[float, float]:
        """Python's blocks of memory per request and step: new ones that live at the hand-over, and ones that stay."""
        gc.collect()
        gc.disable()
        # Counting walks through the whole heap, so it is never on while time is measured.
        self._count_blocks = True
        try:
            alive, began = [], sys.getallocatedblocks()
            for _ in range(steps):
                before = sys.getallocatedblocks()
                self.step()
                alive.append(self._handed_over - before)
            # Less the integers in `alive`, one per step, which are this benchmark's own.
            stayed = sys.getallocatedblocks() - began - steps
        finally:
            gc.enable()
            self._count_blocks = False
        return sum(alive) / steps / len(self.streams), stayed / steps / len(self.streams)

    def _stream(self, index: int, tokens: int, text: bool) -> TokenStream:
        # Prompts differ in length by up to a page, so that a page is due to as many requests in each step.
        prompt = np.full(PROMPT + index % PAGE_SIZE, 3 + index, np.int64)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
        req = Req(str(index), 0, prompt, params, 0, tokens)
        detokenizer = IncrementalDetokenizer(_tokenizer(), [3], True) if text else None
        outputs = [PendingOutput(0, detokenizer, None)]
        stream = self._outputs.stream(Started(str(index), PROMPT), outputs, lambda _: None, Turnstile())
        stream.reqs = [req]
        req.sink = stream
        self.scheduler.intake.add(req)
        return stream

    def _emit(self, outputs: StepOutputs, now: float) -> None:
        self._mark("publish")
        if self._count_blocks:
            self._handed_over = sys.getallocatedblocks()
        self._outputs.emit(outputs, now)
        self._mark("hand over")

    def _mark(self, part: str) -> None:
        now = time.thread_time()
        self._parts.seconds[part] += now - self._since
        self._since = now


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(str(bundled_model_dir()))
