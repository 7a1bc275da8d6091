"""The production step in plain integers, for most of the seeds: the same order of the same effects, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from core.batch.result import Accepted, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.device.staging import Staging
from core.memory.request_memory import RequestMemory
from core.sampling.places import Places
from core.speculation.drafter import Ran
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
        size = writes.page_size
        if len(writes.rows):
            places = zip(writes.rows.tolist(), writes.places.tolist(), writes.pages.tolist(), strict=True)
            for row, place, page in places:
                table[row][place * size : place * size + size] = range(page * size, page * size + size)
        for side in self.sides:
            side.begin(batch.companion_writes.get(side.name))
        self.relay.forget(plain.fresh)
        if self.trials is not None:
            self.trials.guesser.begin(batch)
        for row, ids in zip(batch.history_writes.rows, batch.history_writes.ids, strict=True):
            self._history[row] = ids.tolist()
        inputs, tables = self._inputs(batch, plain), [table[row] for row in rows]
        states = self._forward(plain, inputs, tables)
        if plain.verifies:
            return self._verify(batch, plain, inputs, states)
        lens = torch.tensor([plain.ends[place] for place in plain.places])
        where = Places.of(batch.sampling, lens, Staging(CPU))
        tokens = hash_sampler.sample([states[place] for place in plain.places], batch.sampling, where, self._seen)
        marks = self._spoil(plain, tokens)
        self._relay(batch, plain, [[token] for token in tokens])
        return self._result(batch, tokens, marks)

    def _verify(self, batch: ScheduleBatch, plain: Plain, inputs: list[int], states: list[int]) -> StepResult:
        """Sample behind every token, and keep what comes before the first draft that is another."""
        assert batch.spec is not None, "it has drafts"
        if batch.sampling.any_penalty:
            for row, start, ids in zip(plain.rows, plain.starts, plain.pieces(inputs), strict=True):
                self._history[row][start:] = ids
        spans = zip(plain.starts, plain.ends, strict=True)
        lens = torch.tensor([length for start, end in spans for length in range(start + 1, end + 1)])
        sampling = batch.sampling.spread(np.asarray(plain.lens))
        tokens = hash_sampler.sample(states, sampling, Places.of(sampling, lens, Staging(CPU)), self._seen)
        marks = self._spoil(plain, tokens)
        kept, bad, at = list[list[int]](), [], 0
        for length, tried in zip(plain.lens, plain.tried, strict=True):
            found = tokens[at : at + length]
            count = 1 + next((i for i, token in enumerate(tried) if found[i] != token), len(tried))
            kept.append(found[:count])
            bad.append(bool(marks[at : at + count].any()))
            at += length
        for side in self.sides:
            side.judged([*map(len, kept)])
        self._relay(batch, plain, kept)
        counts, proposed = (np.array([*map(len, each)]) for each in (kept, plain.tried))
        accepted = Accepted(counts, proposed, batch.spec.drafts + 1)
        return replace(self._result(batch, [*chain(*kept)], np.array(bad)), accepted=accepted)

    def _result(self, batch: ScheduleBatch, tokens: list[int], marks: np.ndarray) -> StepResult:
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
        bounds = batch.lower_lens.tolist(), batch.prefix_lens.tolist()[first:]
        lens = self.relay.lengths(tails, *bounds) if tails else []
        found = prompt + self.relay.gather(tails)
        if plain.verifies:
            rows = zip(tails, found, plain.lens, strict=True)
            found = [id for row, newest, count in rows for id in (newest, *self.relay.drafts[row][: count - 1])]
            assert [ids[1:] for ids in plain.pieces(found)] == plain.tried, "the relay has kept what was guessed"
        if self.relay.counts != [0, 0] or lens != plain.starts[first:]:
            raise Violation("relay_check", f"unwritten reads and wrong lengths: {self.relay.counts}, {lens}")
        staging.prefill_ids_cpu = staging.mix_decode_rows = staging.encoder_ids_cpu = None
        return found

    def _relay(self, batch: ScheduleBatch, plain: Plain, tokens: list[list[int]]) -> None:
        """`tokens`: of each row that sampled, those that count."""
        if plain.verifies:
            ends = [start + len(each) for start, each in zip(plain.starts, tokens, strict=True)]
        else:
            ends = plain.ends
        self.relay.publish(plain.rows, ends)
        sampling, lens = [plain.rows[place] for place in plain.places], [ends[place] for place in plain.places]
        for place, row in zip(plain.places, sampling, strict=True):
            self.ledger.write(row, plain.generations[place], batch.step_id)
        self.relay.stash(sampling, [each[-1] for each in tokens], self._drafted(batch, sampling, lens, tokens))
        if batch.sampling.any_penalty:
            for row, length, each in zip(sampling, lens, tokens, strict=True):
                self._history[row][length + 1 - len(each) :] = each

    def _drafted(
        self, batch: ScheduleBatch, rows: list[int], lens: list[int], tokens: list[list[int]]
    ) -> list[list[int]] | None:
        if self.trials is None or batch.spec is None:
            return None
        if not rows:
            return []
        ran = Ran(*map(np.array, (rows, lens, [*map(len, tokens)], [*chain(*tokens)])))
        drafts = self.trials.guesser.draft(ran, batch.spec.aim)
        return [ids[:count] for ids, count in zip(drafts.ids.tolist(), drafts.lens.tolist(), strict=True)]

    def _seen(self, row: int, length: int) -> tuple[int, ...]:
        return tuple(self._history[row][:length])
