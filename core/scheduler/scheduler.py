"""The scheduler: one synchronous, deterministic `step`. Clock, executor and emit come from outside.

asyncio and the forward thread are thin shells around it. That makes simulation possible: the production object runs
under a seed, with a fake executor and a fake clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from core import buggify
from core.batch.result import StepResult
from core.config import SchedulerConfig
from core.executor.interface import Executor
from core.invariants import check
from core.lanes import EMIT, INTAKE, PLAN, PUBLISH, RESULTS, SUBMIT, LaneRecorder
from core.memory.request_memory import RequestMemory
from core.scheduler.draft_depth import Depth
from core.scheduler.fair_share import FairShare, in_its_part
from core.scheduler.host_cache import HostCache
from core.scheduler.intake import Intake
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.outputs import Ending, StepOutputs, StepTokens
from core.scheduler.pace import Pace
from core.scheduler.phases import PhaseClock
from core.scheduler.planner import Planner
from core.scheduler.policy import POLICIES
from core.scheduler.result_processor import ResultProcessor
from core.scheduler.running import RunningSet
from core.scheduler.sampling_table import SamplingTable
from core.scheduler.tally import Tally
from core.scheduler.waiting_queue import WaitingQueue
from core.types.arrays import Ints
from core.types.request import Req
from core.types.stats import EngineStats

Emit = Callable[[StepOutputs, float], None]

PUBLISH_SECONDS: Final = 0.005
"""Least time between two snapshots of the statistics while nothing but tokens comes: each takes about 25 us of the
loop's thread, which a step of half a millisecond would feel, and no scraper reads so often."""


class Scheduler:
    """Composes the rooms of this floor; holds no policy of its own.

    `max_len`: tokens of the longest sequence. `pin`: copies prompt ids to memory that the device can copy from.
    `depth`: how many drafts a step verifies; None where speculation is off.
    `stages`: ranks of a pipeline that runs the steps.
    `host_cache`: what host memory keeps of keys and values; None where it keeps nothing.
    `emit(outputs, now)` gets the outputs of a step after the next step was submitted, so that the device never waits
    for work that is done for clients.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: RequestMemory,
        executor: Executor,
        emit: Emit,
        *,
        max_len: int,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        pin: Callable[[list[Ints]], torch.Tensor],
        lanes: LaneRecorder | None = None,
        pace: Pace | None = None,
        depth: Depth | None = None,
        host_cache: HostCache | None = None,
        stages: int = 1,
    ) -> None:
        policy = POLICIES[config.policy]()
        self._most_queued = config.max_queued_requests
        num_rows = memory.rows.size + 1
        self.memory = memory
        self.executor = executor
        self.intake = Intake()
        self.waiting = WaitingQueue(policy)
        self.running = RunningSet(num_rows, max_len)
        self._phases = PhaseClock(lanes or LaneRecorder())
        self.tally = Tally(self._phases, speculates=depth is not None, prompt_tokens=config.prompt_tokens)
        sampling = SamplingTable(num_rows, vocab_size, eos_ids)
        shares = FairShare(config.prompt_tokens, num_rows)
        self._lifecycle = Lifecycle(self.waiting, self.running, memory, sampling, self.tally, shares, host_cache)
        self._planner = Planner(
            config, policy, self._lifecycle, sampling, pin, executor.resolve_seq_lens, depth, stages
        )
        self._results = ResultProcessor(self._lifecycle, self.tally, vocab_size, eos_ids)
        self._emit = emit
        self.host_cache = self.tally.host_cache = host_cache
        """None where host memory keeps nothing."""
        self._depth = depth
        self._pace = pace or Pace()
        self._due: float | None = None
        """When the next step will be planned, if that was put off; else None."""
        self._device_idle = True
        self._begun: tuple[Req, ...] = ()
        """Requests whose first new token is made by a step that was submitted since the last outputs."""
        self.held = False
        """Whether no step is planned for now. What was submitted ends, and commands are applied as ever."""
        self._publish_at = float("-inf")
        self.stats: EngineStats = self.tally.publish(memory, 0, 0)

    @property
    def has_work(self) -> bool:
        """Whether another call of `step` could do anything without news from outside."""
        return bool(len(self.running) or len(self.waiting) or len(self.intake) or self.executor.in_flight)

    def step(self, now: float) -> bool:
        """Take finished results, apply commands, submit what fits, emit. Returns whether anything happened.

        `now`: seconds of the loop's clock. Raises the error of a failed step: nothing of that batch or of any other can
        be trusted after it.
        """
        self._phases.begin()
        tokens = tuple(out for result in self.executor.completed() for out in self._take(result, now))
        self._phases.done(RESULTS, self.tally.step)
        commands = len(self.intake)
        self.intake.drain(self._lifecycle.enter, self._end)
        for expired in self.intake.expired(now):
            self._end(expired)
        returned = self.host_cache is not None and self.host_cache.settle()
        for lease in self.memory.leases.overdue(now):
            self.memory.reclaim(lease)
            returned = True
        self._phases.done(INTAKE, self.tally.step)
        submitted = self._submit(now)
        ended = self._lifecycle.take_ended()
        for terminal in ended:
            self.tally.ended(terminal.req, _reason(terminal), now)
            self.intake.forget(terminal.req)
        if not (tokens or ended or submitted or commands or returned):
            return False
        if ended or commands or self.executor.in_flight == 0 or now >= self._publish_at:
            self.publish()
            self._publish_at = now + PUBLISH_SECONDS
            self._phases.done(PUBLISH, self.tally.step)
        begun, self._begun = self._begun, ()
        if outputs := StepOutputs(tokens, ended, begun):
            buggify.point("before_emit")
            self._emit(outputs, now)
            self._phases.done(EMIT, self.tally.step)
        return True

    def has_room(self, tenant: str, count: int) -> bool:
        """Whether `count` more requests of `tenant` may wait.

        Into a full queue they still may if the tenant then has at most an equal part of it: else one tenant could lock
        out the others. T tenants that fill it one after another wait with (1 + 1/2 + ... + 1/T) times as many in all.
        """
        # Requests that arrived since the last step take free rows first; only the rest of them waits.
        queued = len(self.waiting) + max(0, len(self.intake) - self.memory.rows.available)
        if queued + count <= self._most_queued:
            return True
        tenants = len({tenant, *self.waiting.tenants, *self.intake.arriving})
        own = self.waiting.waiting_of(tenant) + self.intake.arriving[tenant]
        return in_its_part(own + count, tenants, self._most_queued)

    def publish(self) -> None:
        """Renew `stats`. Also called when the engine dies, so that the violation it died of can be scraped."""
        self.stats = self.tally.publish(self.memory, len(self.running), len(self.waiting))

    def flush(self, tenant: str | None = None) -> int:
        """Give up every prefix that no request reads, of `tenant` or of all, in host memory too; returns its pages."""
        flushed = self._lifecycle.flush(tenant)
        self.publish()
        return flushed

    @property
    def is_still(self) -> bool:
        """Whether no step and no copy is in flight, to files either: nothing reads or writes the pools."""
        copying = self.host_cache is not None and self.host_cache.is_copying
        return self.executor.in_flight == 0 and len(self.memory.leases) == 0 and not copying

    def start_over(self) -> int:
        """Queue every running request again, and forget all that was computed; returns how many ran. While still.

        Requests keep their outputs. Their keys and values, those of the prefix cache and those in host memory go.
        """
        check("still_pools", self.is_still, in_flight=self.executor.in_flight, leases=len(self.memory.leases))
        count = self._lifecycle.start_over()
        self.publish()
        return count

    def next_expiry(self) -> float | None:
        """When `step` must be called even if nothing else happens, in seconds of the loop's clock; None for never."""
        known = (self.intake.next_expiry(), self.memory.leases.next_deadline(), self._due)
        return min((each for each in known if each is not None), default=None)

    def abandon(self) -> list[Req]:
        """Every request that has no terminal yet, for an engine that dies. Changes nothing.

        Requests that ended in the step that failed are among them: that step emits nothing any more.
        """
        return [*self.running.members(), *self.waiting.members(), *self.intake.members(), *self._lifecycle.untold()]

    def _take(self, result: StepResult, now: float) -> list[StepTokens]:
        if result.error is not None:
            raise result.error
        self._pace.finished(now)
        if self._depth is not None:
            self._depth.observe(result)
        return self._results.process(result, now)

    def _submit(self, now: float) -> bool:
        """Plan and submit steps while the executor has room; whether any was submitted."""
        submitted, self._due = False, None
        if self.held:
            self._nothing_planned()
            return False
        if self._lifecycle.shares.contended:
            self._pace.shared(now)
        while self.executor.has_room:
            if now < (due := self._pace.due()):
                self._due = due
                break
            idle, slow, in_flight = self._device_idle, self._pace.is_slow, self.executor.in_flight
            batch = self._planner.plan(now, after_idle=idle, slow=slow, in_flight=in_flight)
            self._phases.done(PLAN, 0 if batch is None else batch.step_id)
            if batch is None:
                self._nothing_planned()
                break
            buggify.point("planned")
            self.executor.submit(batch)
            if batch.num_extend:
                last_chunks = batch.sample_indices[batch.sample_indices < batch.num_extend]
                self._begun += tuple(self.running.owners(batch.rows[last_chunks]))
            if self.host_cache is not None:
                self.host_cache.submitted(batch)
            tokens = self.tally.submitted(batch)
            self._pace.submitted(now, tokens)
            self._phases.done(SUBMIT, batch.step_id, tokens)
            self._device_idle = False
            submitted = True
        return submitted

    def _nothing_planned(self) -> None:
        # With no step in flight either, the gap before the next step is no idle time of the device.
        self._device_idle = self._device_idle or self.executor.in_flight == 0

    def _end(self, ending: Ending) -> None:
        # A request that has had logits of its own ends as any other, though another output of its prompt was condemned.
        if ending.condemned and self._lifecycle.is_without_logits(ending.req):
            self._lifecycle.condemn(ending)
        else:
            self._lifecycle.end(replace(ending, condemned=False) if ending.condemned else ending)


def _reason(ended: Ending) -> str:
    """The value of `reason` under which the ending is counted."""
    return ended.reason.value if ended.reason else (ended.error.reason.lower() if ended.error else "unknown")
