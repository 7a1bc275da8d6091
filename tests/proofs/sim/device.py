"""The executor of the simulation: a queue of frozen batches, executed one after another when the run says so.

What changes hands between two submissions travels in the same queue (`Handover`): the device learns that a row or page
was freed exactly between the steps that were submitted before and after it, however late it executes them. It uses that
to poison what was freed, never to compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from core.batch.result import Published, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.memory.request_memory import RequestMemory
from core.types.arrays import Ints
from tests.proofs.sim.companions import CompanionSide, Owner
from tests.proofs.sim.contract import Contract, fingerprint
from tests.proofs.sim.kv_memory import KVMemory, Table
from tests.proofs.sim.ledger import Ledger
from tests.proofs.sim.plain import Plain, planned_slots
from tests.proofs.sim.poison import Poison
from tests.proofs.sim.reference import ROOT, blend
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Story, Violation
from tests.proofs.sim.trials import Trials

FINGERPRINT_EVERY = 8
SECONDS = 2.0**-16
"""That the fake device takes for a token; a power of two, so that sums of times are exact."""


class DeviceLost(RuntimeError):
    """The fault that fails a step as a whole."""


@dataclass(slots=True)
class Handover:
    """Owners (row, generation) and pages that were freed since the submission before."""

    owners: list[tuple[int, int]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Watch:
    """Sees rows and pages being freed. Stands on the allocator's instance, and reads the rows' generations."""

    def __init__(self, memory: RequestMemory) -> None:
        self._rows = memory.rows
        self._told = self._rows.generations.tolist()
        self._pages: list[int] = []
        self.frees = 0
        free = memory.allocator.free

        def watched(pages: Ints) -> None:
            free(pages)
            self._pages += pages.tolist()
            self.frees += 1

        memory.allocator.free = watched  # type: ignore[method-assign]

    def take(self) -> Handover:
        """What was freed since the last call."""
        now: list[int] = self._rows.generations.tolist()
        handover = Handover(pages=self._pages)
        if now != self._told:
            for row, (old, new) in enumerate(zip(self._told, now, strict=True)):
                handover.owners += [(row, generation) for generation in range(old, new)]
            self._told = now
        self._pages = []
        return handover


@dataclass(slots=True)
class Job:
    """A submitted batch and what was freed before it. `left`: what each companion wants the device to know of that
    moment. `print`: the arrays of the batch when it was submitted, in some steps.
    """

    batch: ScheduleBatch
    freed: Handover
    left: list[Any]
    print: tuple[bytes, ...] | None
    condemned: list[tuple[Owner, bool]]
    """Owners to condemn, of requests that failed before it, and whether their own requests did."""
    slots: list[int]
    """As in `Plain`."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What one executed step took, and the device's wait before it, in seconds of the world's clock."""

    step_id: int
    sampled: int
    """Rows that sampled."""
    busy: float
    waited: float
    """Whether it could have had work in that time or not."""


class SimExecutor(ABC):
    """`core.executor.interface.Executor`; `execute_one` and `deliver_one` play the device, each in submission order."""

    def __init__(
        self, memory: RequestMemory, sides: Sequence[CompanionSide], scenario: Scenario, story: Story, hits: Hits
    ) -> None:
        self.sides = tuple(sides)
        self.depth = scenario.depth
        self._contract = Contract(scenario.config.prompt_tokens)
        self.ledger = Ledger()
        self.spoil = -1
        """Which row of the next step computes NaN, counted from those that sample; -1: none."""
        self.spoiled: set[tuple[int, int]] = set()
        """Owners (row, generation) whose logits were spoiled so far."""
        self.trials: Trials | None = None
        """What the device must make of drafts; None where there are none."""
        if scenario.drafts is not None:
            self.trials = Trials(scenario.seed, scenario.drafts, hits)
        self.taken: list[StepResult] = []
        """With drafts: results that were taken, for the books of bounds, which empty this."""
        self.ahead: dict[Owner, int] = {}
        """Tokens beside the first of a step whose lengths were told before its result."""
        self.fail_next = False
        self.now = 0.0
        """The world's clock."""
        size = memory.allocator.page_size
        self.kv = KVMemory((memory.allocator.num_pages + 1) * size, size)
        self.poison = Poison(size, hits)
        self._memory = memory
        self._watch = Watch(memory)
        self._story, self._hits = story, hits
        self._submitted: deque[Job] = deque()
        self._executed: deque[StepResult] = deque()
        self._delivered: list[StepResult] = []
        self._timed: deque[Timed] = deque()
        self._told: list[Timed] = []
        self._free_at: float | None = None
        """When the step before was over."""
        self._flying = self._wanted = 0
        self._failure: Exception | None = None
        self.lens = [-1] * (memory.rows.size + 1)
        """By row: tokens whose KV is written and counts; -1 where the owner's first step is still to come."""

    @property
    def in_flight(self) -> int:
        """Batches whose results were not taken."""
        return self._flying

    @property
    def has_room(self) -> bool:
        """Fewer than `depth` in flight."""
        return self._flying < self.depth

    @property
    def news(self) -> bool:
        """Whether a result waits to be taken: what wakes the engine's loop."""
        return bool(self._delivered) or self._published(self._wanted) is not None

    @property
    def frees(self) -> int:
        """How often pages were freed."""
        return self._watch.frees

    @property
    def queued(self) -> list[ScheduleBatch]:
        """Batches that the device has not executed."""
        return [job.batch for job in self._submitted]

    def submit(self, batch: ScheduleBatch) -> None:
        """Queue a step behind what was freed before it."""
        if self._flying >= self.depth:
            raise Violation("executor_depth", f"{self._flying} steps in flight, depth {self.depth}")
        self._flying += 1
        freed = self._watch.take()
        if self._submitted and (freed.owners or freed.pages):
            self._note_reuse(batch, freed)
        left = [side.leave(batch, [job.left[i] for job in self._submitted]) for i, side in enumerate(self.sides)]
        self._submitted.append(
            Job(
                batch,
                freed,
                left,
                fingerprint(batch) if batch.step_id % FINGERPRINT_EVERY == 0 else None,
                self.poison.take(),
                planned_slots(batch, self._memory),
            )
        )

    def completed(self) -> list[StepResult]:
        """Results that were delivered since the last call."""
        results, self._delivered = self._delivered, []
        self._flying -= len(results)
        self.ahead = {} if results else self.ahead
        self._told += [self._timed.popleft() for result in results if result.error is None]
        if self.trials is not None:
            self.taken += results
        return results

    def resolve_seq_lens(self, step_id: int) -> Published | None:
        """Known once the step was executed, delivered or not; else `news` tells when it is."""
        found = self._published(step_id)
        self._wanted = step_id if found is None else 0
        if found is not None and found.accepted is not None:
            self._hits("lengths_resolved")
            self.taken.append(found)
            told = zip(found.rows.tolist(), found.generations.tolist(), found.accepted.counts.tolist(), strict=True)
            self.ahead = {(row, generation): count - 1 for row, generation, count in told}
            self._story.note(f"the lengths of step {step_id} are known before its tokens")
            accepted = found.accepted
            return Published(step_id, found.rows, found.generations, accepted.counts, accepted.planned)
        return None

    def _published(self, step_id: int) -> StepResult | None:
        """The result of a step that was executed and not taken, if it verified drafts."""
        for result in (*self._executed, *self._delivered):
            if result.step_id == step_id and result.accepted is not None:
                return result
        return None

    def take_timed(self) -> list[Timed]:
        """Of the steps whose results were taken since the last call."""
        seen, self._told = self._told, []
        return seen

    def stop(self) -> None:
        """Nothing more is submitted."""
        self._flying = self.depth

    def execute_one(self) -> bool:
        """Execute the oldest step; whether there was one."""
        if not self._submitted:
            return False
        job = self._submitted.popleft()
        if self.fail_next and self._failure is None:
            self._failure = DeviceLost("the device is lost")
        if self._failure is not None:
            # As in the forward thread: what is behind a failed step would read what that did not write.
            self._executed.append(StepResult.failed(job.batch.step_id, self._failure))
            return True
        plain = Plain.of(job.batch)
        plain.slots = job.slots
        self._take_back(job.freed)
        self.poison.begin(job.condemned)
        if job.print is not None and job.print != fingerprint(job.batch):
            raise Violation("frozen_batch", f"step {job.batch.step_id} changed after it was submitted")
        self._contract.check(job.batch, plain, self.lens)
        if self.trials is not None:
            self.trials.begin(job.batch, plain, self.lens)
        for side, left in zip(self.sides, job.left, strict=True):
            side.take_back(job.freed.owners, left)
            side.check_writes(plain, job.batch.companion_writes.get(side.name))
        result = self._time(job.batch, plain, self._compute(job.batch, plain))
        ends = plain.ends if self.trials is None else self.trials.judge(job.batch, plain, result)
        for row, end in zip(plain.rows, ends, strict=True):
            self.lens[row] = end
        for side, left in zip(self.sides, job.left, strict=True):
            side.look_back(self.kv, left)
        self._story.decided((result.step_id, *plain.rows, *result.tokens.tolist()))
        self._executed.append(result)
        return True

    def deliver_one(self) -> bool:
        """Let the scheduler see the oldest executed step; whether there was one."""
        if self._executed:
            self._delivered.append(self._executed.popleft())
            return True
        return False

    def settle(self) -> None:
        """Everybody has left: apply what was freed since the last submission, and close the books."""
        self._take_back(self._watch.take())
        if self.ledger.open_rows():
            raise Violation("unread_token", f"tokens that nobody read or discarded in rows {self.ledger.open_rows()}")

    def _time(self, batch: ScheduleBatch, plain: Plain, result: StepResult) -> StepResult:
        """As the production step reports it: a wait for want of requests is none."""
        busy = (1 + sum(plain.lens) + len(plain.encoder_ids)) * SECONDS
        began = self.now if self._free_at is None else max(self.now, self._free_at)
        waited = 0.0 if self._free_at is None else began - self._free_at
        self._free_at = began + busy
        self._timed.append(Timed(batch.step_id, len(plain.places), busy, waited))
        return replace(result, busy=busy, idle=0.0 if batch.after_idle else waited)

    @abstractmethod
    def _compute(self, batch: ScheduleBatch, plain: Plain) -> StepResult:
        """Table writes, inputs, forward, sampling, relay."""

    def _forward(self, plain: Plain, ids: list[int], tables: list[Table]) -> list[int]:
        """What the fake model makes of each row: what all the pools that it reads say together. Where drafts are
        verified, what it makes of each token.
        """
        out = plain.slots
        found = (side.roots(plain) for side in self.sides)
        plain.roots = next((each for each in found if each is not None), [ROOT] * len(plain.rows))
        read = [self.kv.run(plain.rows, plain.starts, plain.lens, ids, tables, out, plain.roots, plain.verifies)]
        read += [side.run(plain, ids, tables, self.kv) for side in self.sides]
        self.poison.run(plain, tables, out, self._spoiled_place(plain))
        return read[0] if len(read) == 1 else list(map(blend, *read))

    @abstractmethod
    def _forget_table(self, row: int) -> None:
        """Poison the table of a row that was freed."""

    def _take_back(self, freed: Handover) -> None:
        for row, generation in freed.owners:
            self.ledger.discard(row, generation)
            self._forget_table(row)
            self.lens[row] = -1
        self.kv.poison(freed.pages)
        self.poison.freed(freed.pages)

    def _note_reuse(self, batch: ScheduleBatch, freed: Handover) -> None:
        flying, fresh = {row for job in self._submitted for row in job.batch.rows.tolist()}, batch.fresh_rows.tolist()
        if not flying.isdisjoint(fresh):
            self._hits("row_reused_in_flight")
        if any(job.batch.verifies and not _drafting(job.batch).isdisjoint(fresh) for job in self._submitted):
            self._hits("draft_row_reused")
        size = self.kv.page_size
        taken = set(batch.table_writes.pages.tolist())
        if any(slot // size in taken for job in self._submitted for slot in job.slots):
            self._hits("page_reused_in_flight")

    def _spoiled_place(self, plain: Plain) -> int:
        """Which row of the step goes wrong by itself, one in the middle of its prompt where none samples; -1: none."""
        if self.spoil < 0:
            return -1
        spoil, self.spoil = self.spoil, -1
        return plain.places[spoil % len(plain.places)] if plain.places else spoil % len(plain.rows)

    def _spoil(self, plain: Plain, tokens: list[int]) -> np.ndarray:
        """bool[S], for each of `tokens`; a spoiled one is 0, as the real sampler leaves it."""
        marks = np.zeros(len(tokens), np.bool_)
        for place, row in enumerate(plain.sampled if self.poison.bad else ()):
            if row in self.poison.bad:
                marks[place] = True
                tokens[place] = 0
                self.spoiled.add(self.poison.bad[row])
        return marks


def _drafting(batch: ScheduleBatch) -> set[int]:
    """Rows of which `batch` verifies drafts."""
    assert batch.spec is not None, "it has drafts"
    return set(batch.rows[batch.num_extend :][batch.spec.drafts > 0].tolist())
