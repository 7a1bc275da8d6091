"""The production device side of the recurrent states: table, pool and mixer wrapper around a recurrence that hashes.

Only the recurrence itself is made up. It keeps its hash in a convolution window of one channel and one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from core.batch.forward_batch import ForwardBatch
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool, StateLayerSpec, StateShape
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.hf.recurrent import PackedMixer, StateContext, StateView
from tests.proofs.sim.kv_memory import UNWRITTEN
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.states import StateSide, absorb
from tests.proofs.sim.story import Hits

LAYER = StateLayerSpec(0, StateShape((1, 1), torch.int64), None)
CPU = torch.device("cpu")


def recurrence(hidden: torch.Tensor, *, cache_params: StateView) -> torch.Tensor:
    """A mixer as transformers writes one: int64[n, t, 2] of tokens and positions to int64[n, t, 1], changing states."""
    states = cache_params.get_conv_state(LAYER.layer_id)
    said = torch.empty(*hidden.shape[:2], 1, dtype=torch.int64)
    for entry, tokens in enumerate(hidden.tolist()):
        for place, (token, position) in enumerate(tokens):
            said[entry, place] = states[entry] = absorb(int(states[entry]), [token], position)
    return said


class RealStates(StateSide):
    """`HybridReqToTokenPool` over a `MambaPool`, which the production step tells of the writes by itself."""

    def __init__(self, scenario: Scenario, hits: Hits, requests: ReqToTokenPool) -> None:
        super().__init__(scenario, hits)
        self.pool = HybridReqToTokenPool(requests, MambaPool([LAYER], self.host.size, CPU, self.room))
        self._context = StateContext(self.pool)
        self._mixer = PackedMixer(recurrence, LAYER.layer_id, False, self._context)
        self._batch: ForwardBatch | None = None

    def receive(self, batch: ForwardBatch) -> None:
        """The step whose forward runs next."""
        self._batch = batch

    def held(self, slots: Sequence[int]) -> list[int]:
        """See `StateSide`."""
        states, _ = self.pool.states.gather(LAYER.layer_id, torch.tensor(slots, dtype=torch.int64))
        return [int(state) for state in states.flatten().tolist()]

    def slots_of(self, rows: Sequence[int]) -> list[int]:
        """See `StateSide`. Inside a step what the step found, before it what it would find."""
        slots = self.pool.mapping[list(rows)] if self._batch is None else self.pool.step_slots
        return [int(slot) for slot in slots.tolist()]

    def forget(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """See `StateSide`."""
        self.pool.mapping[list(rows)] = 0
        # What drafts left means nothing in the next step.
        poisoned = [*slots, *range(self.host.size + 1, self.host.size + 1 + self.room)]
        poison = torch.full((len(poisoned), *LAYER.conv.shape), UNWRITTEN)
        self.pool.states.scatter(LAYER.layer_id, torch.tensor(poisoned, dtype=torch.int64), poison, None)

    def begin(self, writes: Any) -> None:
        """See `CompanionSide`: the pool itself is told, by the step."""

    def advance(self, plain: Plain, ids: list[int]) -> list[int]:
        """See `StateSide`."""
        batch, self._batch = self._batch, None
        assert batch is not None, "a forward runs inside a step"
        self._context.begin(batch)
        said = self._mixer(torch.stack([batch.input_ids, batch.positions], dim=-1)[None])
        lasts = torch.arange(said.shape[1]) if plain.verifies else torch.tensor(plain.lens).cumsum(0) - 1
        return [int(state) for state in said[0, lasts, 0].tolist()]
