"""The production step in plain integers, for most of the seeds: the same order of the same effects, without tensors."""

from __future__ import annotations

import numpy as np

from core.batch.result import StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.memory.request_memory import RequestMemory
from tests.sim import hash_sampler
from tests.sim.device import SimExecutor
from tests.sim.relay_twin import RelayTwin
from tests.sim.scenario import Scenario
from tests.sim.story import Hits, Story, Violation


class TwinDevice(SimExecutor):
    """Table writes, forget, input resolution, KV writes, reads, sampling, publish, stash, history."""

    def __init__(self, memory: RequestMemory, scenario: Scenario, story: Story, hits: Hits) -> None:
        super().__init__(memory, scenario, story, hits)
        rows = memory.rows.size + 1
        self.relay = RelayTwin(rows)
        self._blank = [0] * scenario.width
        self._table = [self._blank[:] for _ in range(rows)]
        self._history: list[list[int]] = [[] for _ in range(rows)]

    def _forget_table(self, row: int) -> None:
        self._table[row] = self._blank[:]
        self._history[row] = []

    def _compute(self, batch: ScheduleBatch) -> StepResult:
        rows, starts = batch.rows.tolist(), batch.prefix_lens.tolist()
        writes, table = batch.table_writes, self._table
        for row, position, slot in zip(
            writes.rows.tolist(), writes.positions.tolist(), writes.slots.tolist(), strict=True
        ):
            table[row][position] = slot
        self.relay.forget(batch.fresh_rows.tolist())
        for row, ids in zip(batch.history_writes.rows, batch.history_writes.ids, strict=True):
            self._history[row] = ids.tolist()
        inputs = self._inputs(batch, rows, starts)
        states = self.kv.run(
            rows, starts, batch.extend_lens.tolist(), inputs, [table[row] for row in rows], batch.out_cache_loc.tolist()
        )
        places = batch.sample_indices.tolist()
        tokens = hash_sampler.sample([states[i] for i in places], batch.sampling, self._seen)
        marks = self._spoil(batch, tokens)
        self._relay(batch, rows, places, tokens)
        return StepResult(
            batch.step_id, batch.sample_rows, batch.sample_generations, np.asarray(tokens, np.int64), marks,
            hash_sampler.logprobs(tokens, batch.sampling), np.asarray(self.relay.counts, np.int64),
        )  # fmt: skip

    def _inputs(self, batch: ScheduleBatch, rows: list[int], starts: list[int]) -> list[int]:
        """The four cases of `core.relay.resolve`, and its clearing of the staging."""
        staging, tails = batch.staging, rows[batch.num_extend :]
        prompt: list[int] = []
        if staging.prefill_ids_cpu is not None:
            prompt = staging.prefill_ids_cpu.tolist()
            tails = tails if staging.mix_decode_rows is not None else []
        for row, generation in zip(tails, batch.generations[batch.num_extend :].tolist(), strict=bool(tails)):
            self.ledger.read(row, generation, batch.step_id)
        found = prompt + self.relay.gather(tails, starts[batch.num_extend :] if tails else [])
        if self.relay.counts != [0, 0]:
            raise Violation("relay_check", f"unwritten reads and wrong lengths: {self.relay.counts}")
        staging.prefill_ids_cpu = staging.mix_decode_rows = None
        return found

    def _relay(self, batch: ScheduleBatch, rows: list[int], places: list[int], tokens: list[int]) -> None:
        self.relay.publish(rows, batch.seq_lens.tolist())
        sampling = [rows[i] for i in places]
        for row, generation in zip(sampling, batch.sample_generations.tolist(), strict=True):
            self.ledger.write(row, generation, batch.step_id)
        self.relay.stash(sampling, tokens)
        if batch.sampling.any_penalty:
            for row, length, token in zip(sampling, batch.sampling.history_lens.tolist(), tokens, strict=True):
                self._history[row][length:] = [token]

    def _seen(self, row: int, length: int) -> tuple[int, ...]:
        return tuple(self._history[row][:length])
