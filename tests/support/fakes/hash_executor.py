"""A fake device for the scheduler: the next token is a hash of everything the step read through the page tables.

Any wrong page, stale row, missing write or changed order changes a token. It executes frozen batches in submission
order with the semantics of the real step (table writes, forget, input resolution, KV writes, then reads, stash), on
numpy arrays, and delivers a result only when the test says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from core.batch.result import Published, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.executor.interface import MAX_DEPTH
from core.types.arrays import Ints

UNWRITTEN = -1
MIX = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def chain(state: int, token: int, position: int) -> int:
    """One link of the hash over a sequence's contents."""
    return ((state ^ (token * 2654435761 + position + 1)) * MIX) & MASK


def next_token(contents: Sequence[int], seed: int, vocab_size: int, forbidden: frozenset[int] = frozenset()) -> int:
    """The token that follows `contents`, one packed (token, position) value per place."""
    state = (seed * MIX + 1) & MASK
    for value in contents:
        state = chain(state, value, 0)
    token = (state >> 20) % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return int(token)


def content(token: int, position: int) -> int:
    """What the KV slot of a token holds: both what it is and where it stands."""
    return token * 1_000_003 + position


class HashExecutor:
    """`core.executor.interface.Executor` over numpy arrays; `run_one` plays the device."""

    def __init__(self, num_rows: int, max_len: int, num_slots: int, vocab_size: int, depth: int = MAX_DEPTH) -> None:
        self.table = np.zeros((num_rows, max_len), np.int64)
        self.kv = np.full(num_slots, UNWRITTEN, np.int64)
        self.future = np.full(num_rows, UNWRITTEN, np.int64)
        self.vocab_size = vocab_size
        self.depth = depth
        self.batches: list[ScheduleBatch] = []
        self.mutate: Callable[[StepResult], StepResult] | None = None
        self._submitted: deque[ScheduleBatch] = deque()
        self._done: deque[StepResult] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._submitted) + len(self._done)

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.depth

    def submit(self, batch: ScheduleBatch) -> None:
        assert self.has_room
        self.batches.append(batch)
        self._submitted.append(batch)

    def completed(self) -> list[StepResult]:
        results = list(self._done)
        self._done.clear()
        return results

    def resolve_seq_lens(self, step_id: int) -> Published | None:
        """Known once the step has run, whether its result is seen or not."""
        assert self.batches[-1].step_id == step_id, "the newest step"
        for result in self._done:
            if result.step_id == step_id and result.accepted is not None:
                accepted = result.accepted
                return Published(step_id, result.rows, result.generations, accepted.counts, accepted.planned)
        return None

    def stop(self) -> None:
        self._submitted.clear()

    def run_one(self) -> bool:
        """Execute the oldest submitted step; whether there was one."""
        if not self._submitted:
            return False
        result = self._execute(self._submitted.popleft())
        self._done.append(self.mutate(result) if self.mutate else result)
        return True

    def _execute(self, batch: ScheduleBatch) -> StepResult:
        assert (batch.rows > 0).all() and len(set(batch.rows.tolist())) == len(batch.rows)
        entered, at, slots_there = batch.table_writes.tokens()
        self.table[entered, at] = slots_there
        self.future[batch.fresh_rows] = UNWRITTEN
        tokens, positions = self._inputs(batch)
        rows = np.repeat(batch.rows, batch.extend_lens)
        assert (batch.lower_lens == batch.prefix_lens[batch.num_extend :]).all(), "a token a step: each length is known"
        slots = self.table[rows, positions]
        assert (slots > 0).all(), "slot 0 of page 0 is padding"
        self.kv[slots] = [content(t, p) for t, p in zip(tokens.tolist(), positions.tolist(), strict=True)]
        sampled = np.asarray([self._sample(batch, i) for i in batch.sample_indices.tolist()], np.int64)
        self.future[batch.sample_rows] = sampled
        nothing = np.zeros(len(sampled), np.bool_)
        return StepResult(batch.step_id, batch.sample_rows, batch.sample_generations, sampled, nothing)

    def _inputs(self, batch: ScheduleBatch) -> tuple[Ints, Ints]:
        decode_rows = batch.rows[batch.num_extend :]
        relayed = self.future[decode_rows]
        assert (relayed != UNWRITTEN).all(), f"rows {decode_rows[relayed == UNWRITTEN]} read before they were written"
        self.future[decode_rows] = UNWRITTEN
        staged = batch.staging.prefill_ids_cpu
        prompt = np.empty(0, np.int64) if staged is None else staged.numpy()
        ends = np.cumsum(batch.extend_lens)
        starts = np.repeat(batch.prefix_lens - (ends - batch.extend_lens), batch.extend_lens)
        return np.concatenate([prompt, relayed]), np.arange(len(starts)) + starts

    def _sample(self, batch: ScheduleBatch, i: int) -> int:
        row, length = int(batch.rows[i]), int(batch.seq_lens[i])
        contents = self.kv[self.table[row, :length]]
        assert (contents != UNWRITTEN).all(), f"row {row} reads a slot that no step wrote"
        return next_token(contents.tolist(), 0, self.vocab_size)


def pin(parts: list[Ints]) -> torch.Tensor:
    """Prompt ids as the scheduler stages them."""
    return torch.from_numpy(np.concatenate(parts))


def reference(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """What a correct engine generates for `prompt`: no pools, no batches, no overlap."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token([content(t, p) for p, t in enumerate(ids)], 0, vocab_size))
    return ids[len(prompt) :]
