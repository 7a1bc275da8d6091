"""What a batch must be that the device executes: frozen since it was submitted, and in line with where the rows are."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.story import Violation


def fingerprint(batch: ScheduleBatch) -> tuple[bytes, ...]:
    """The arrays of a batch, to see whether anybody changed them after submission (law 3)."""
    writes, spec = batch.table_writes, batch.spec
    arrays = (
        batch.rows,
        batch.generations,
        batch.prefix_lens,
        batch.extend_lens,
        batch.lower_lens,
        batch.sample_indices,
        batch.fresh_rows,
        batch.encoder_lens,
        writes.rows,
        writes.places,
        writes.pages,
        batch.sampling.uniforms,
        batch.sampling.lower_lens,
        batch.sampling.upper_lens,
        *(() if spec is None else (spec.drafts, spec.limits)),
    )
    others = pickle.dumps(dict(batch.companion_writes)) if batch.companion_writes else b""
    return (*(array.tobytes() for array in arrays), others)


class Contract:
    """Of one device. `budget`: tokens of prompts in one step, and all tokens of a step that verifies drafts."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def check(self, batch: ScheduleBatch, plain: Plain, lens: Sequence[int]) -> None:
        """`lens`, by row: tokens that the device has of its owner, -1 for one whose first step this must be."""
        step, rows, fresh = plain.step_id, plain.rows, plain.fresh
        owners = set(rows)
        if not rows or min(rows) < 1 or len(owners) != len(rows) or min(plain.lens) < 1:
            raise Violation("batch_rows", f"step {step}: rows {rows}, {plain.lens} tokens")
        if not owners.issuperset(fresh) or len(set(fresh)) != len(fresh):
            raise Violation("batch_rows", f"step {step}: rows {rows}, new owners in {fresh}")
        self._check_budget(plain, batch.num_extend)
        lower = [*plain.starts[: batch.num_extend], *batch.lower_lens.tolist()]
        if batch.spec is None and lower != plain.starts:
            raise Violation("positions", f"step {step} goes on at {lower} or at {plain.starts}, without drafts")
        for row, least, most in zip(rows, lower, plain.starts, strict=True):
            known = lens[row]
            if (known == -1) != (row in fresh) or (known != -1 and least == most != known):
                raise Violation("positions", f"step {step} row {row} goes on at {most}, the device is at {known}")
            if known != -1 and not least <= known <= most:
                raise Violation("bounds", f"step {step} row {row}: the device is at {known}, not in {least} to {most}")
        self._check_sampling(batch, plain, lower)

    def _check_sampling(self, batch: ScheduleBatch, plain: Plain, lower: list[int]) -> None:
        """Options are those of every place that a row may sample at."""
        ends = plain.ends if batch.spec is None else _clipped(plain.ends, batch)
        low = [plain.ends[place] if place < batch.num_extend else lower[place] + 1 for place in plain.places]
        bounds = batch.sampling.lower_lens.tolist(), batch.sampling.upper_lens.tolist()
        if bounds != (low, [ends[place] for place in plain.places]):
            raise Violation("positions", f"step {plain.step_id} samples at {bounds}, rows end at {lower} to {ends}")

    def _check_budget(self, plain: Plain, chunks: int) -> None:
        """Inputs of an encoder count; one that leaves nothing has its step to itself, with one token of its decoder."""
        lens, encoded = plain.lens[:chunks], sum(plain.encoder_lens)
        alone = encoded and chunks == 1
        if sum(lens) > (max(1, self._budget - encoded) if alone else self._budget - encoded):
            text = f"step {plain.step_id}: chunks of {lens}, inputs of {plain.encoder_lens}, for {self._budget} tokens"
            raise Violation("chunk_budget", text)


def _clipped(ends: list[int], batch: ScheduleBatch) -> list[int]:
    """`ends` of rows, of decode rows at most their limits."""
    assert batch.spec is not None, "rows have limits"
    clipped = np.asarray(ends)
    clipped[batch.num_extend :] = np.minimum(clipped[batch.num_extend :], batch.spec.limits)
    found: list[int] = clipped.tolist()
    return found
