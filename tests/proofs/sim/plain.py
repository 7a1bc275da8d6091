"""A frozen batch as lists, which is how the fake device reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from core.batch.build import token_positions
from core.batch.schedule_batch import ScheduleBatch
from core.memory.request_memory import RequestMemory
from core.types.arrays import Ints
from tests.proofs.sim.story import Violation
from tests.support.page_slots import slots_of


@dataclass(slots=True)
class Plain:
    """The arrays of a batch as lists, read when the device executes it."""

    step_id: int
    rows: list[int]
    generations: list[int]
    starts: list[int]
    lens: list[int]
    ends: list[int]
    fresh: list[int]
    places: list[int]
    """Of rows that sample."""
    encoder_ids: list[int]
    """Inputs that an encoder reads in this step, one after another, and how long each is."""
    encoder_lens: list[int]
    roots: list[int] = field(default_factory=list)
    """What the first token of each row follows; found out when the forward begins."""
    slots: list[int] = field(default_factory=list)
    """The KV slot of each token, as the scheduler had it when it submitted the batch; the table must say the same."""
    verifies: bool = False
    """Whether drafts are verified: then a token is sampled behind each one computed."""
    tried: list[list[int]] = field(default_factory=list)
    """The drafts of each row that are computed behind its newest token."""

    @classmethod
    def of(cls, batch: ScheduleBatch) -> Plain:
        """Lists are several times faster than arrays of three numbers."""
        starts, lens = batch.prefix_lens.tolist(), batch.extend_lens.tolist()
        staged = batch.staging.encoder_ids_cpu
        return cls(
            step_id=batch.step_id,
            rows=batch.rows.tolist(),
            generations=batch.generations.tolist(),
            starts=starts,
            lens=lens,
            ends=[start + length for start, length in zip(starts, lens, strict=True)],
            fresh=batch.fresh_rows.tolist(),
            places=batch.sample_indices.tolist(),
            encoder_ids=[] if staged is None else staged.tolist(),
            encoder_lens=batch.encoder_lens.tolist(),
            verifies=batch.verifies,
            tried=[[]] * len(starts),
        )

    @property
    def sampled(self) -> list[int]:
        """The row of each token that is sampled."""
        if self.verifies:
            return [row for row, length in zip(self.rows, self.lens, strict=True) for _ in range(length)]
        return [self.rows[place] for place in self.places]

    def pieces(self, ids: list[int]) -> Iterator[list[int]]:
        """The input ids of each row, out of those of the whole step."""
        at = 0
        for length in self.lens:
            yield ids[at : at + length]
            at += length


def reach(batch: ScheduleBatch) -> tuple[Ints, Ints]:
    """(the first position that a step may write, how many from there) of each row; int64[B] both."""
    firsts, ends = batch.prefix_lens, batch.seq_lens
    if batch.spec is not None:
        chunks = batch.num_extend
        firsts = np.concatenate([firsts[:chunks], batch.lower_lens])
        ends[chunks:] = np.minimum(ends[chunks:], batch.spec.limits)
    return firsts, ends - firsts


def planned_slots(batch: ScheduleBatch, memory: RequestMemory) -> list[int]:
    """The KV slot of each position that a step may write, by the pages that its rows hold while it is submitted."""
    firsts, counts = reach(batch)
    rows, positions = np.repeat(batch.rows, counts), token_positions(firsts, counts)
    if batch.spec is not None and (positions >= memory._count[rows] * memory.page_size).any():
        text = f"{firsts.tolist()} and the next {counts.tolist()}, pages: {memory._count[batch.rows].tolist()}"
        raise Violation("unpaged", f"step {batch.step_id} may write rows {batch.rows.tolist()} at {text}")
    return slots_of(memory, rows, positions).tolist()
