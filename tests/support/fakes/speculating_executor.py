"""The hash executor with drafts: an adversary drafts what it likes, and outputs stay what they are without it.

It verifies as the device does: the drafts behind a row's newest token are computed with it, each place is sampled, and
the row goes on behind the first draft that was wrong. Where its rows stand only it knows, until a result is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from core.batch.result import Accepted, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.types.arrays import Ints
from tests.support.fakes.hash_executor import UNWRITTEN, HashExecutor, content, next_token

Adversary = Callable[[list[int], int], list[int]]
"""(the tokens that will follow, how many drafts are wanted) -> drafts."""


def always_right(truth: list[int], count: int) -> list[int]:
    """What will be sampled."""
    return truth[:count]


class SpeculatingExecutor(HashExecutor):
    """`adversary` drafts behind each step that samples; `lens[row]` is where the row stands, -1 for a new owner's."""

    adversary: Adversary = staticmethod(always_right)

    def __init__(self, num_rows: int, max_len: int, num_slots: int, vocab_size: int, depth: int) -> None:
        super().__init__(num_rows, max_len, num_slots, vocab_size, depth)
        self.lens = np.full(num_rows, UNWRITTEN, np.int64)
        self.drafts: list[list[int]] = [[] for _ in range(num_rows)]
        self.accepted = self.proposed = self.widest = 0

    def _execute(self, batch: ScheduleBatch) -> StepResult:
        assert batch.spec is not None, "speculation is on"
        entered, at, slots_there = batch.table_writes.tokens()
        self.table[entered, at] = slots_there
        self.future[batch.fresh_rows] = self.lens[batch.fresh_rows] = UNWRITTEN
        for row in batch.fresh_rows.tolist():
            self.drafts[row] = []
        staged = batch.staging.prefill_ids_cpu
        prompt = [] if staged is None else staged.tolist()
        tokens: list[int] = []
        counts, proposed = [], []
        for place, row in enumerate(batch.rows.tolist()):
            if place < batch.num_extend:
                start, length = int(batch.prefix_lens[place]), int(batch.extend_lens[place])
                sampled, (ids, prompt) = [], (prompt[:length], prompt[length:])
                self._write(row, start, ids)
                if place in batch.sample_indices:
                    sampled = [self._at(row, start + length)]
            else:
                start, sampled, tried = self._verify(batch, place - batch.num_extend, row)
                proposed.append(tried)
                length = len(sampled)
            self.lens[row] = start + length
            if sampled:
                self._relay(batch, row, sampled[-1])
                tokens += sampled
                counts.append(len(sampled))
        return self._result(batch, tokens, counts, proposed)

    def _verify(self, batch: ScheduleBatch, decode: int, row: int) -> tuple[int, list[int], int]:
        """(tokens before the step, those sampled and accepted, drafts tried)."""
        assert batch.spec is not None
        start = int(self.lens[row])
        assert batch.lower_lens[decode] <= start <= batch.prefix_lens[batch.num_extend + decode], "outside the bounds"
        newest, self.future[row] = int(self.future[row]), UNWRITTEN
        assert newest != UNWRITTEN, f"row {row} is read before it was written"
        room = min(int(batch.spec.drafts[decode]), int(batch.spec.limits[decode]) - start - 1)
        assert room >= 0, "a row is computed beyond its end"
        drafts = self.drafts[row][:room]
        self.widest = max(self.widest, len(drafts))
        self._write(row, start, [newest, *drafts])
        sampled: list[int] = []
        for place in range(len(drafts) + 1):
            sampled.append(self._at(row, start + place + 1))
            if place < len(drafts) and sampled[-1] != drafts[place]:
                break
        self.accepted += len(sampled) - 1
        self.proposed += len(drafts)
        return start, sampled, len(drafts)

    def _relay(self, batch: ScheduleBatch, row: int, newest: int) -> None:
        assert batch.spec is not None
        self.future[row] = newest
        length, known = int(self.lens[row]), []
        contents = [*self._contents(row, length), content(newest, length)]
        for _ in range(batch.spec.aim.most + 1):
            known.append(next_token(contents, 0, self.vocab_size))
            contents.append(content(known[-1], length + len(known)))
        self.drafts[row] = self.adversary(known, batch.spec.aim.most)

    def _write(self, row: int, start: int, ids: Sequence[int]) -> None:
        slots = self.table[row, start : start + len(ids)]
        assert (slots > 0).all(), "slot 0 of page 0 is padding"
        self.kv[slots] = [content(token, start + i) for i, token in enumerate(ids)]

    def _contents(self, row: int, length: int) -> list[int]:
        contents: list[int] = self.kv[self.table[row, :length]].tolist()
        assert UNWRITTEN not in contents, f"row {row} reads a slot that no step wrote"
        return contents

    def _at(self, row: int, length: int) -> int:
        return next_token(self._contents(row, length), 0, self.vocab_size)

    def _result(self, batch: ScheduleBatch, tokens: list[int], counts: list[int], proposed: list[int]) -> StepResult:
        prompts = len(counts) - len(proposed)
        planned: Ints = np.concatenate([np.ones(prompts, np.int64), batch.extend_lens[batch.num_extend :]])
        tried = np.concatenate([np.zeros(prompts, np.int64), np.asarray(proposed, np.int64)])
        accepted = Accepted(np.asarray(counts, np.int64), tried, planned)
        nothing = np.zeros(len(counts), np.bool_)
        rows, generations = batch.sample_rows, batch.sample_generations
        return StepResult(batch.step_id, rows, generations, np.asarray(tokens, np.int64), nothing, accepted=accepted)
