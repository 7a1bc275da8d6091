"""One seed, played: the production scheduler between clients that misbehave and a device that lags, fails and lies."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from core.batch.schedule_batch import ScheduleBatch
from core.device.staging import Staging
from core.engine.adapters.table import AdapterTable
from core.errors import Draining, EngineDead
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.prefix.registry import build_prefix_cache
from core.scheduler.outputs import Ending, StepOutputs
from core.scheduler.pace import Pace
from core.scheduler.scheduler import Scheduler
from core.types.stats import EngineStats
from tests.proofs.sim.adapters import AdapterTwin
from tests.proofs.sim.classes import Classes
from tests.proofs.sim.clients import Clients
from tests.proofs.sim.companions import CompanionSide
from tests.proofs.sim.cross import CrossTwin
from tests.proofs.sim.device import DeviceLost, SimExecutor
from tests.proofs.sim.inputs import TICK, Inputs
from tests.proofs.sim.oracles import Oracles
from tests.proofs.sim.real_cross import RealCross
from tests.proofs.sim.real_states import RealStates
from tests.proofs.sim.real_step import RunnerDevice
from tests.proofs.sim.reference import EOS, VOCAB
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.shares import Shares
from tests.proofs.sim.standstills import Standstills
from tests.proofs.sim.states import StateTwin
from tests.proofs.sim.story import Hits, Story, Violation
from tests.proofs.sim.transfers import Transfers
from tests.proofs.sim.trials import Trials
from tests.proofs.sim.twin_device import TwinDevice
from tests.proofs.sim.windows import WindowTwin

BURST = 0.15
"""How often the device gets through one more step than usual."""
STATS_EVERY = 8
"""In most runs a snapshot is published after every so many steps only."""
LONG_TICKS = 2
"""A step that takes so many is a long one."""
CPU = torch.device("cpu")


class World:
    """Everything of one run. `run` raises what the first oracle has to say."""

    def __init__(self, scenario: Scenario, story: Story, hits: Hits) -> None:
        self.scenario, self.story, self.hits = scenario, story, hits
        self.now = 0.0
        self.ticks = 0
        self._rng = random.Random(scenario.seed * 2)
        self._draining = 0
        self._open = True
        self._build()

    def run(self, steps: int) -> None:
        """`steps` steps with input, then as many as it takes to end everybody; nothing may be left behind."""
        for _ in range(steps):
            self.tick()
        self.finish()

    def _build(self) -> None:
        """A new engine, as after a restart of the process."""
        scenario = self.scenario
        allocator = PagedKVAllocator(scenario.pages, scenario.page_size)
        cache = build_prefix_cache(scenario.cache, scenario.page_size)
        self.device: SimExecutor
        table: AdapterTable | None = None
        if scenario.real_steps:
            pool = ReqToTokenPool(scenario.rows, scenario.width, CPU)
            reals = ((scenario.states, RealStates), (scenario.cross, RealCross))
            real = [kind(scenario, self.hits, pool) for drawn, kind in reals if drawn is not None]
            self.memory = RequestMemory(pool.rows, allocator, cache, scenario.context, [side.host for side in real])
            self.device = RunnerDevice(self.memory, real, pool, scenario, self.story, self.hits)
        else:
            kinds = ((scenario.states, StateTwin), (scenario.windows, WindowTwin), (scenario.cross, CrossTwin))
            sides: list[CompanionSide] = [kind(scenario, self.hits) for drawn, kind in kinds if drawn is not None]
            if scenario.adapters is not None:
                adapters = AdapterTwin(scenario, self.hits)
                sides.append(adapters)
                table = adapters.table
            rows, hosts = RowAllocator(scenario.rows), [side.host for side in sides]
            self.memory = RequestMemory(rows, allocator, cache, scenario.context, hosts)
            self.device = TwinDevice(self.memory, sides, scenario, self.story, self.hits)
        for side in self.device.sides:
            side.stand(self.device.lens)
        self.scheduler = Scheduler(
            scenario.config,
            self.memory,
            self.device,
            self._emit,
            max_len=scenario.width,
            vocab_size=VOCAB,
            eos_ids=EOS,
            pin=Staging(CPU).pinned if scenario.real_steps else cast(Any, np.concatenate),
            pace=Pace(LONG_TICKS * TICK if scenario.paced else math.inf),
            depth=scenario.drafts,
        )
        self.clients = Clients(self.scheduler.intake.end, self.device.spoiled, self.story, self.hits)
        self.inputs = Inputs(
            scenario, self.scheduler, self.device, self.clients, self._rng, self.story, self.hits, table
        )
        self.oracles = Oracles(scenario, self.scheduler, self.device, self.clients, self.hits)
        self._classes = Classes(scenario, self.scheduler, self.hits)
        self._shares = Shares(scenario, self.scheduler, self.hits)
        self._transfers = Transfers(scenario.seed, self.scheduler, self.device, self.hits)
        self._standstills = Standstills(scenario.seed, self.scheduler, self.clients, self.story, self.hits)
        self._hook_planner()
        self.device.poison.watch(self.scheduler._lifecycle)
        self._hook_condemnation()
        if not scenario.real_steps:
            self._thin_stats()

    def _emit(self, outputs: StepOutputs, now: float) -> None:
        self.clients.emit(outputs, now)

    def _hook_planner(self) -> None:
        """Force retractions where the planner itself would retract: after results were taken, before it plans."""
        planner, plan = self.scheduler._planner, self.scheduler._planner.plan
        plans = 0

        def hooked(now: float, *, after_idle: bool, slow: bool, in_flight: int) -> ScheduleBatch | None:
            nonlocal plans
            plans += 1
            if self.scenario.retract_every and self._open and plans % self.scenario.retract_every == 0:
                self._force_retraction()
            self._standstills.planned()
            self._shares.before_plan()
            batch = plan(now, after_idle=after_idle, slow=slow, in_flight=in_flight)
            self._shares.after_plan(batch)
            self._classes.after_plan(batch)
            if batch is not None and self.device.trials is not None:
                self._announce(batch, self.device.trials)
            self.oracles.planned(batch)
            self._note_batch(batch)
            return batch

        planner.plan = hooked  # type: ignore[method-assign]

    def _announce(self, batch: ScheduleBatch, trials: Trials) -> None:
        """Tell the drafter who comes, so that it knows what follows."""
        for row in batch.fresh_rows.tolist():
            req = self.scheduler.running.reqs[row]
            trials.guesser.arrives((row, req.generation), req.sink)

    def _hook_condemnation(self) -> None:
        """Readers of what failed are computed again: not a retraction that the policy decides."""
        lifecycle, condemn = self.scheduler._lifecycle, self.scheduler._lifecycle.condemn

        def hooked(ended: Ending) -> None:
            before = {each: each.retractions for each in self.clients.live}
            condemn(ended)
            for reader in (each for each, retractions in before.items() if each.retractions > retractions):
                reader.sink.forced += 1
                self.hits("poison_reader")
                self.story.note(f"{reader.sink.name} is computed again: it read what {ended.req.sink.name} computed")

        lifecycle.condemn = hooked  # type: ignore[method-assign]

    def _force_retraction(self) -> None:
        members = self.scheduler.running.members()
        if members:
            req = members[int(self._rng.random() * len(members))]
            req.sink.forced += 1
            self.story.note(f"forced retraction of {req.sink.name} from row {req.row}")
            self.scheduler._lifecycle.retract(req)
            self.hits("forced_retraction")

    def _note_batch(self, batch: ScheduleBatch | None) -> None:
        if batch is None:
            self.hits("empty_plan")
            return
        extend = batch.num_extend
        if extend:
            fresh = set(batch.fresh_rows.tolist())
            starts = batch.prefix_lens[:extend].tolist()
            if any(start and row in fresh for row, start in zip(batch.rows.tolist(), starts, strict=False)):
                self.hits("prefix_hit")
            if batch.num_decode:
                self.hits("mixed_step")
            if len(batch.sample_indices) < len(batch.rows):
                self.hits("middle_chunk")
        self.story.decided((*batch.rows.tolist(), *batch.prefix_lens.tolist(), *batch.table_writes.pages.tolist()))
        if self.story.tracing:
            owners = zip(batch.rows.tolist(), batch.generations.tolist(), strict=True)
            spans = zip(owners, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True)
            told = ", ".join(f"{row}.{generation}[{start}:{end}]" for (row, generation), start, end in spans)
            freed = f", {self.memory.obtainable_pages} pages left"
            self.story.note(f"plan {batch.step_id} {batch.mode.value}: {told}{freed}")
            for side in self.device.sides:
                if text := side.told(batch):
                    self.story.note(f"  {text}")

    def _thin_stats(self) -> None:
        """A snapshot after every step would be a fifth of all work in most runs; `Measures` asks for its own."""
        tally, publish, calls = self.scheduler.tally, self.scheduler.tally.publish, 0

        def thinned(memory: RequestMemory, running: int, waiting: int) -> EngineStats:
            nonlocal calls
            calls += 1
            return publish(memory, running, waiting) if calls % STATS_EVERY == 0 else self.scheduler.stats

        tally.publish = thinned  # type: ignore[method-assign]

    def tick(self) -> None:
        """One step of the scheduler with all that comes before and after it."""
        self.ticks += 1
        self.story.step += 1
        self.now += TICK
        if self._open:
            self._disturb()
        due, progress = self.clients.take_due(), self.clients.progress
        self.device.now = self.now
        self.oracles.before_step(self.now)
        if self.scenario.standstills and self._open:
            self._standstills.before_step()
        told = self.scenario.transfers and self._open and self._transfers.before_step(self.now, TICK)
        before, flying = (self.device.frees, len(self.scheduler.intake)), self.device.in_flight
        expiry = self.scheduler.next_expiry()
        woken = told or before[1] > 0 or self.device.news or (expiry is not None and expiry <= self.now)
        try:
            moved = self.scheduler.step(self.now)
        except DeviceLost:
            self._die()
            return
        # What took no command and no result, freed nothing and returned False has changed nothing.
        if moved or before != (self.device.frees, 0) or flying != self.device.in_flight or not self._open:
            self.oracles.after_step(due, self.now)
        if not moved and not self.device.in_flight:
            self.oracles.after_idle_step()
        if not woken and self.clients.progress != progress:
            raise Violation("slept_through", "the loop would have slept: no command, no result, no expiry was due")
        self._run_device()

    def _disturb(self) -> None:
        faults, rng = self.scenario.faults, self._rng
        if self._draining:
            self._drain_on()
            return
        self.inputs.before_step(self.now)
        for name, act in (
            ("clock_jump", self._jump),
            ("nan_row", self._spoil),
            ("drain", self._drain),
            ("step_failure", self._fail),
        ):
            if name in faults and rng.random() < faults[name]:
                act()

    def _jump(self) -> None:
        self.now += int(self._rng.random() * 100) * TICK
        self.hits("clock_jump")
        self.story.note(f"the clock jumps to {self.now:.2f}")

    def _spoil(self) -> None:
        self.device.spoil = int(self._rng.random() * 8)
        self.story.note("the next step yields a row of NaN")

    def _fail(self) -> None:
        self.device.fail_next = True
        self.story.note("the next step of the device fails")

    def _drain(self) -> None:
        self._draining = 1 + int(self._rng.random() * 12)
        self.hits("drain")
        self.story.note(f"drain: no more requests, {self._draining} steps of grace")

    def _drain_on(self) -> None:
        """Grace, then everybody ends with Draining; then a new life begins, as if the drain had been called off."""
        if self._draining > 1:
            self._draining -= 1
            return
        self.inputs.end_all(lambda req: Ending(req, error=Draining("the server is shutting down")))
        self.story.note("drain: the grace is over")
        self._draining = 0

    def _run_device(self) -> None:
        device, rng, speed = self.device, self._rng, self.scenario.speed if self._open else 1.0
        rounds = 2 if rng.random() < BURST else 1
        moved = False
        for _ in range(rounds):
            if rng.random() < speed:
                device.execute_one()
            if rng.random() < speed:
                moved = device.deliver_one()
        if device.in_flight == device.depth and not moved:
            self.hits("device_lag")

    def _die(self) -> None:
        """The step failed: everybody who is live is named once for the engine to tell, and a new process starts."""
        abandoned = self.scheduler.abandon()
        if len(abandoned) != len(self.clients.live) or set(abandoned) != set(self.clients.live):
            raise Violation("abandon", f"{len(abandoned)} abandoned, {len(self.clients.live)} live")
        self.hits("step_failure")
        self.story.note(f"{EngineDead.reason}: {len(abandoned)} requests end, the engine is built again")
        self._draining = 0
        self.inputs.close()
        self._build()

    def finish(self) -> None:
        """No more input; everybody ends within the steps that their work takes."""
        self._open = False
        self._transfers.finish()
        self._standstills.finish()
        self.oracles.begin_to_finish()
        while self.scheduler.has_work:
            self.tick()
        if self.clients.live:
            raise Violation("liveness", f"{len(self.clients.live)} requests are live and nobody works for them")
        self.oracles.when_empty()
        self.device.settle()
        if self.inputs.adapters is not None:
            self.inputs.adapters.when_empty()
        self.inputs.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a seed ended. `oracle` names who saw the violation; empty when nobody did."""

    seed: int
    ticks: int
    digest: int
    oracle: str = ""
    text: str = ""
