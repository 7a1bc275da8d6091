"""A step that verifies drafts in compiled code has the tokens of operations on tensors, and slots of the same table."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.executor.sampling_step import SampledRows, SamplingStep
from core.memory.req_to_token_pool import ReqToTokenPool
from core.native.host import HOST
from core.native.kept_library import ExtensionUnavailable
from core.sampling.sampler import Sampler
from core.speculation.drafter import Drafts
from core.speculation.trial import Trial
from tests.unit.core.sampling.batches import CPU, Row, batch_of

VOCAB, ROWS, MOST = 97, 5, 4


def sample(*, compiled: bool, temperatures: list[float], rng: np.random.Generator, spreads: list[int]) -> SampledRows:
    """Tokens at all places of rows with drafts; a place has a random number and logits of its own."""
    pool = ReqToTokenPool(ROWS, 32, CPU)
    step = SamplingStep(pool, Sampler(VOCAB, CPU), "results", None)
    if compiled:
        try:
            step.compile(HOST.load())
        except ExtensionUnavailable as reason:
            pytest.skip(f"no native code here: {reason}")
    rows = [Row(torch.empty(VOCAB), temperature, prompt=(1, 2, 3)) for temperature in temperatures]
    options = replace(batch_of(rows), uniforms=rng.random((ROWS, MOST + 1)))
    # The newest token of a row is not among those in the pools.
    before = options.lower_lens - 1
    drafts = Drafts(rng.integers(0, VOCAB, (ROWS, MOST)), rng.integers(0, MOST + 1, ROWS))
    trial = Trial.of(np.full(ROWS, 7), before, drafts, np.full(ROWS, MOST), VOCAB)
    logits = torch.from_numpy(rng.normal(0, 2, (len(trial.ids), VOCAB)).astype(np.float32))
    spread = Trial.spread

    def counted(self: Trial, sampling: Any) -> Any:
        spreads.append(len(self.ids))
        return spread(self, sampling)

    batch: Any = SimpleNamespace(sampling=options, rows=options.rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "spread", counted)
        return step.sample(logits, batch, torch.from_numpy(trial.positions + 1), trial)


@pytest.mark.parametrize("temperatures", [[0.0] * ROWS, [0.8] * ROWS, [0.0, 1.0, 0.0, 0.5, 0.0]])
def test_each_place_has_the_token_of_operations_on_tensors(temperatures: list[float], seed: int) -> None:
    spreads: list[int] = []
    tensors, code = (
        sample(compiled=compiled, temperatures=temperatures, rng=np.random.default_rng(seed), spreads=spreads)
        for compiled in (False, True)
    )
    assert code.output.tokens.tolist() == tensors.output.tokens.tolist()
    assert code.output.non_finite.tolist() == tensors.output.non_finite.tolist()
    assert len(spreads) == (1 if max(temperatures) == 0 else 2), "greedy rows have no options to spread"


def test_slots_are_found_on_the_host_too(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = ReqToTokenPool(ROWS, 32, CPU)
    pool.table.copy_(torch.from_numpy(rng.integers(0, 1000, (ROWS + 1, 32)).astype(np.int32)))
    rows, positions = rng.integers(0, ROWS + 1, 40), rng.integers(0, 32, 40)
    found = pool.slots_on_host(rows, positions)
    assert found.dtype == np.int64
    assert found.tolist() == pool.slots(torch.from_numpy(rows), torch.from_numpy(positions)).tolist()
