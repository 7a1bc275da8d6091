"""The production step in plain integers, for most of the seeds: the same order of the same effects, without tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.batch.result import StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.device.staging import Staging
from core.memory.request_memory import RequestMemory
from core.sampling.places import Places
from tests.proofs.sim import hash_sampler
from tests.proofs.sim.companions import CompanionSide
from tests.proofs.sim.device import SimExecutor
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.relay_twin import RelayTwin
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Story, Violation

CPU = torch.device("cpu")


class TwinDevice(SimExecutor):
    """Table writes, forget, input resolution, KV writes, reads, sampling, publish, stash, history."""

    def __init__(
        self, memory: RequestMemory, sides: Sequence[CompanionSide], scenario: Scenario, story: Story, hits: Hits
    ) -> None:
        super().__init__(memory, sides, scenario, story, hits)
        rows = memory.rows.size + 1
        self.relay = RelayTwin(rows)
        self._blank = [0] * scenario.width
        self._table = [self._blank[:] for _ in range(rows)]
        self._history: list[list[int]] = [[] for _ in range(rows)]

    def _forget_table(self, row: int) -> None:
        self._table[row] = self._blank[:]
        self._history[row] = []

    def _compute(self, batch: ScheduleBatch, plain: Plain) -> StepResult:
        rows, table, writes = plain.rows, self._table, batch.table_writes
        if len(writes.rows):
            places = zip(writes.rows.tolist(), writes.positions.tolist(), writes.slots.tolist(), strict=True)
            for row, position, slot in places:
                table[row][position] = slot
        for side in self.sides:
            side.begin(batch.companion_writes.get(side.name))
        self.relay.forget(plain.fresh)
        for row, ids in zip(batch.history_writes.rows, batch.history_writes.ids, strict=True):
            self._history[row] = ids.tolist()
        inputs, tables = self._inputs(batch, plain), [table[row] for row in rows]
        states = self._forward(plain, inputs, tables)
        lens = torch.tensor([plain.ends[place] for place in plain.places])
        where = Places.of(batch.sampling, lens, Staging(CPU))
        tokens = hash_sampler.sample([states[place] for place in plain.places], batch.sampling, where, self._seen)
        marks = self._spoil(batch, tokens)
        self._relay(batch, plain, tokens)
        return StepResult(
            step_id=batch.step_id,
            rows=batch.sample_rows,
            generations=batch.sample_generations,
            tokens=np.asarray(tokens, np.int64),
            non_finite=marks,
            logprobs=hash_sampler.logprobs(tokens, batch.sampling),
            assert_counts=np.asarray(self.relay.counts, np.int64),
        )

    def _inputs(self, batch: ScheduleBatch, plain: Plain) -> list[int]:
        """The three cases of `core.relay.resolve`, and its clearing of the staging."""
        staging, first = batch.staging, batch.num_extend
        prompt: list[int] = []
        if staging.prefill_ids_cpu is not None:
            prompt = staging.prefill_ids_cpu.tolist()
            first = first if staging.mix_decode_rows is not None else len(plain.rows)
        tails = plain.rows[first:]
        for row, generation in zip(tails, plain.generations[first:], strict=True):
            self.ledger.read(row, generation, batch.step_id)
        lens = self.relay.lengths(tails, batch.lower_lens.tolist() if tails else [], plain.starts[first:])
        found = prompt + self.relay.gather(tails)
        if self.relay.counts != [0, 0] or lens != plain.starts[first:]:
            raise Violation("relay_check", f"unwritten reads and wrong lengths: {self.relay.counts}, {lens}")
        staging.prefill_ids_cpu = staging.mix_decode_rows = staging.encoder_ids_cpu = None
        return found

    def _relay(self, batch: ScheduleBatch, plain: Plain, tokens: list[int]) -> None:
        self.relay.publish(plain.rows, plain.ends)
        sampling = [plain.rows[place] for place in plain.places]
        for place, row in zip(plain.places, sampling, strict=True):
            self.ledger.write(row, plain.generations[place], batch.step_id)
        self.relay.stash(sampling, tokens)
        if batch.sampling.any_penalty:
            for row, place, token in zip(sampling, plain.places, tokens, strict=True):
                self._history[row][plain.ends[place] :] = [token]

    def _seen(self, row: int, length: int) -> tuple[int, ...]:
        return tuple(self._history[row][:length])
