"""The production step under simulation: StepRunner, FutureMap, resolve, table and history, around a fake forward.

A share of the seeds runs this instead of the twin. Only model and sampler are made up; both read what the real ones
read. The device checks trap.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.grammar_batch import TokenMask
from core.batch.result import StepResult
from core.batch.sampling_batch import SamplingBatch
from core.batch.schedule_batch import ScheduleBatch
from core.device.checks import AssertMode, DeviceChecks
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.executor.device_state import DeviceState
from core.executor.speculator import Speculator
from core.executor.step import StepRunner
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.request_memory import RequestMemory
from core.relay.future_map import FutureMap
from core.relay.payload import Column, RelayPayload
from core.sampling.penalties import TokenHistory
from core.sampling.sampler import SampleOutput, Scored
from core.speculation.drafter import draft_columns
from tests.proofs.sim import hash_sampler
from tests.proofs.sim.device import SimExecutor
from tests.proofs.sim.kv_memory import Table
from tests.proofs.sim.ledger import Ledger
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.real_cross import RealCross
from tests.proofs.sim.real_states import RealStates
from tests.proofs.sim.reference import VOCAB
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Story, Violation

CPU = torch.device("cpu")


class BookedFutureMap(FutureMap):
    """The real map, with every read and write in the ledger under the owner that the step works for."""

    def __init__(
        self,
        pool: ReqToTokenPool,
        streams: DeviceStreams,
        checks: DeviceChecks,
        ledger: Ledger,
        extras: Sequence[Column] = (),
    ) -> None:
        super().__init__(pool, streams, checks, extras)
        self._ledger = ledger
        self._owners: dict[int, int] = {}
        self._step = 0

    def begin(self, batch: ScheduleBatch) -> None:
        """The next accesses are those of `batch`."""
        self.own(dict(zip(batch.rows.tolist(), batch.generations.tolist(), strict=True)), batch.step_id)

    def own(self, owners: dict[int, int], step: int) -> None:
        """`step` works for `owners`, generations by row; for any other row its accesses are those of a stranger."""
        self._owners, self._step = owners, step

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        for row in rows.tolist():
            self._ledger.read(row, self._owners.get(row, -1), self._step)
        return super().gather(rows)

    def stash(self, rows: torch.Tensor, payload: RelayPayload) -> None:
        for row in rows.tolist():
            self._ledger.write(row, self._owners.get(row, -1), self._step)
        super().stash(rows, payload)


class HashModel:
    """A `core.models.base.Model` as far as a step needs one: its "logits" are what the last slots hold, int64[S].

    Where drafts are verified, what each slot holds, int64[T].
    """

    spec = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, device: RunnerDevice) -> None:
        self._device = device

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Writes and reads through the device's own table, at the device's own slots."""
        lens = batch.extend_lens_host.tolist()
        tables = batch.req_to_token.index_select(0, batch.rows).tolist()
        states = self._device.forward(batch, tables)
        every = len(states) == sum(lens)
        places = range(len(states)) if every else (np.cumsum(lens) - 1).tolist()
        of_place = dict(zip(places, states, strict=True))
        return torch.tensor([of_place[place] for place in batch.last_indices.tolist()], dtype=torch.int64)


class HashSampler:
    """A `core.sampling.sampler.Sampler` over such logits, with the real token history."""

    def __init__(self, device: RunnerDevice) -> None:
        self._device = device
        self._history: TokenHistory | None = None

    def score_on(self, scored: Scored, batch: SamplingBatch, history: TokenHistory | None = None) -> None:
        """The first half of a step's sampling brings the history."""
        self._history = history

    def pick(self, scored: Scored, batch: SamplingBatch, mask: TokenMask | None = None) -> SampleOutput:
        """One token per row, all of it read from `batch` and the history. No request is constrained here."""
        assert mask is None, "grammars are not simulated"
        history = self._history

        def seen(row: int, length: int) -> tuple[int, ...]:
            assert history is not None, "a penalised row needs a history"
            return tuple(history.buffer[row, :length].tolist())

        tokens = hash_sampler.sample(scored.logits.tolist(), batch, scored.places, seen)
        marks = torch.from_numpy(self._device.spoil_now(tokens))
        values = hash_sampler.logprobs(tokens, batch)
        columns: Sequence[torch.Tensor | None] = (None, None, None)
        if values is not None:
            columns = [torch.from_numpy(each) for each in (values.values, values.top_ids, values.top_values)]
        return SampleOutput(torch.tensor(tokens, dtype=torch.int64), marks, *columns)


class RunnerDevice(SimExecutor):
    """Executes batches with the production StepRunner."""

    def __init__(
        self,
        memory: RequestMemory,
        sides: Sequence[RealStates | RealCross],
        pool: ReqToTokenPool,
        scenario: Scenario,
        story: Story,
        hits: Hits,
    ) -> None:
        super().__init__(memory, sides, scenario, story, hits)
        assert memory.rows is pool.rows, "host and device share the rows"
        checks, streams = DeviceChecks(AssertMode.TRAP, CPU), DeviceStreams(CPU)
        self._pool = pool
        self._real = tuple(sides)
        self._plain: Plain | None = None
        columns = () if scenario.drafts is None else draft_columns(scenario.drafts.most)
        self._map = BookedFutureMap(pool, streams, checks, self.ledger, columns)
        self._runner = StepRunner(
            DeviceState(
                pool=pool,
                kv_pool=KVPool([KVLayerSpec(0, 1, 1, 1)], 1, 1, torch.float32, CPU),
                future_map=self._map,
                checks=checks,
                streams=streams,
                staging=Staging(CPU),
                model=cast(Any, HashModel(self)),
                sampler=cast(Any, HashSampler(self)),
                companions={side.host.name: side.pool for side in sides},
                verification=None if self.trials is None else partial(Speculator, self.trials.guesser),
            )
        )

    def forward(self, batch: ForwardBatch, tables: list[Table]) -> list[int]:
        """See `SimExecutor._forward`: for the step that runs now, with the inputs as the device resolved them."""
        assert self._plain is not None, "the model runs inside a step"
        for side in self._real:
            side.receive(batch)
        if (out := batch.out_cache_loc.tolist()) != self._plain.slots:
            raise Violation("out_cache_loc", f"the step writes to {out}, planned are {self._plain.slots}")
        return self._forward(self._plain, batch.input_ids.tolist(), tables)

    def spoil_now(self, tokens: list[int]) -> np.ndarray:
        """See `SimExecutor._spoil`: for the step that runs now, from where a real device finds it out."""
        assert self._plain is not None, "the sampler runs inside a step"
        return self._spoil(self._plain, tokens)

    def _forget_table(self, row: int) -> None:
        self._pool.table[row] = 0

    def _compute(self, batch: ScheduleBatch, plain: Plain) -> StepResult:
        self._map.begin(batch)
        self._plain = plain
        result = self._runner.launch(batch).result()
        self._pool.check_padding()
        return result
