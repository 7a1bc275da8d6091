"""Verifies drafts where the forward thread reads no value of the device: a grid of K + 1 places a row, under a mask.

Tokens come to the host with the copies of their step, so drafts are guessed a step late, and travel with the step that
tries them (`core.speculation.guesses`). How many a row tries, and how many were right, the device finds out; the host
learns it with the tokens. A row with a constraint tries none: its masks need tokens that the host has not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import NO_HIDDEN
from core.batch.result import Published
from core.batch.schedule_batch import ForwardMode, ScheduleBatch
from core.device.event import Event
from core.device.staging import Staging
from core.executor.device_state import DeviceState
from core.executor.launched_step import RESULTS
from core.executor.speculator import published
from core.executor.verification import Attempt
from core.relay.resolve import DecodeRows, ResolvedInputs
from core.sampling.sampler import SampleOutput
from core.speculation.drafter import Ran
from core.speculation.grid import Grid
from core.speculation.guesses import Guesser, LateGuesses, far_enough
from core.speculation.verification import Outcome, Tried
from core.types.arrays import Ints

NO_LENGTHS: Ints = np.empty(0, np.int64)
"""Host lengths of a grid: they are on the device, so code that reads them must fail."""


def widths(most: int) -> tuple[int, ...]:
    """Places of a row in the grids that are computed, ascending, for up to `most` drafts: one more than 1, 2, 4, ….

    Few, so that each can be captured. A step takes the least that holds its drafts.
    """
    drafts = {1 << power for power in range(most.bit_length())}
    return tuple(1 + count for count in sorted({*drafts, most}))


@dataclass(frozen=True, slots=True)
class Sent:
    """Tokens on their way to the host."""

    batch: ScheduleBatch
    host: SampleOutput
    copy_done: Event
    outcome: Outcome | None


class GridSpeculator:
    """A `Verification`."""

    needs_hidden = NO_HIDDEN

    def __init__(self, guesser: Guesser, state: DeviceState, most: int) -> None:
        """`most`: drafts for a row."""
        self._guesser = guesser
        self._state = state
        self.widths = widths(most)
        """Places of each row in the grids that are computed, ascending."""
        self.length = far_enough(most)
        """Tokens of a guess."""
        self._sent: deque[Sent] = deque()
        num_rows = state.future_map.num_rows
        self._known: Ints = np.zeros(num_rows, np.int64)
        """By row: tokens of its owner's text that are on the host; means nothing for an owner without drafts."""
        self._since: Ints = np.zeros(num_rows, np.int64)
        """By row: the first step of its owner."""
        self._attempt: Attempt | None = None

    def rehearse(self, forward: ForwardBatch) -> None:
        """See `Verification`: guesses are made on the host."""

    def begin(self, batch: ScheduleBatch) -> Attempt | None:
        """See `Verification`. Before, hears of the steps whose tokens have come by now."""
        assert batch.spec is not None, "speculation is on"
        while self._sent and self._sent[0].copy_done.query():
            self._hear(self._sent.popleft())
        self._since[batch.fresh_rows] = batch.step_id
        for seed in batch.spec.seeds:
            self._known[seed.row] = len(seed.ids)
        self._guesser.begin(batch)
        self._attempt = self._try(batch) if batch.verifies else None
        return self._attempt

    def trial(self, batch: ScheduleBatch, decode: DecodeRows, inputs: ResolvedInputs, staging: Staging) -> Grid | None:
        """See `Verification`."""
        attempt = self._attempt
        if attempt is None:
            return None
        uploaded = staging.upload(attempt.arrays)
        return grid_of(decode.rows, uploaded, inputs.ids, inputs.decode_lens, attempt.width, self._vocab_size)

    def forward_batch(self, batch: ScheduleBatch, decode: DecodeRows, trial: Tried) -> ForwardBatch:
        """See `Verification`."""
        assert isinstance(trial, Grid), "it came from here"
        return grid_batch(self._state, trial)

    def host_lens(self, batch: ScheduleBatch, inputs: ResolvedInputs) -> tuple[Ints, Ints]:
        """See `Verification`. The lengths before the step are those of chunks, and bounds: the backend reads no bound.

        Which is what `grid_safe` promises.
        """
        return batch.prefix_lens, np.minimum(batch.extend_lens, 1) if batch.verifies else batch.extend_lens

    def tell(self, batch: ScheduleBatch, outcome: Outcome | None, told: Callable[[Published], None]) -> None:
        """See `Verification`. Of a grid they come with its results, which wake the loop as well."""
        if batch.verifies and outcome is None:
            told(published(batch, outcome))

    def drafts_behind(self, batch: ScheduleBatch) -> bool:
        """See `Verification`: drafts are made on the host, beside the device's work."""
        return False

    def drafted(
        self,
        batch: ScheduleBatch,
        forward: ForwardBatch | None,
        lens: torch.Tensor,
        tokens: torch.Tensor,
        outcome: Outcome | None,
    ) -> dict[str, torch.Tensor]:
        """See `Verification`: nothing waits in the relay."""
        return {}

    def on_their_way(self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event, outcome: Outcome | None) -> None:
        """See `Verification`."""
        if len(batch.sample_indices):
            self._sent.append(Sent(batch, host, copy_done, outcome))

    def _try(self, batch: ScheduleBatch) -> Attempt | None:
        """What is known to be guessed for the rows of `batch`; None if that is nothing."""
        assert batch.spec is not None, "speculation is on"
        room = batch.spec.drafts.copy()
        # No prompts stand beside drafts, so each row samples, in its place.
        room[batch.sampling.constrained] = 0
        guesses = self._guesser.guess(batch.rows, self.length)
        room[guesses.lens == 0] = 0
        most = int(room.max())
        if most == 0:
            return None
        width = next(width for width in self.widths if width > most)
        return Attempt(width, room, batch.spec.limits, guesses, self._known[batch.rows])

    def _hear(self, sent: Sent) -> None:
        """Tell the guesser what a step sampled, but for rows that have another owner by now."""
        batch, outcome, recorder = sent.batch, sent.outcome, self._state.streams.recorder
        if recorder is not None:
            recorder.read(RESULTS, (batch.step_id,))
        rows, tokens = batch.sample_rows, sent.host.tokens.numpy()
        counts: Ints = np.ones(len(rows), np.int64)
        if outcome is not None:
            counts, tokens = outcome.counts, tokens[outcome.kept]
        same = self._since[rows] <= batch.step_id
        tokens, rows, counts = tokens[np.repeat(same, counts)], rows[same], counts[same]
        self._known[rows] += counts
        self._guesser.hear(Ran(rows, self._known[rows] - 1, counts, tokens))

    @property
    def _vocab_size(self) -> int:
        return self._state.model.spec.vocab_size


def grid_of(
    rows: torch.Tensor,
    arrays: Sequence[torch.Tensor],
    newest: torch.Tensor,
    before: torch.Tensor,
    width: int,
    vocab_size: int,
) -> Grid:
    """The grid of n rows, by device operations alone. `arrays`: those of the `Attempt`, on the device.

    `rows`, `newest`, `before`: int64[n], rows of the pool, the newest token of each and how many come before it.
    """
    room, limits, ids, lens, known = arrays
    late = LateGuesses(ids.view(len(newest), -1), lens, known)
    drafts = late.drafts(newest, before, width - 1)
    return Grid.of(rows, newest, before, drafts, torch.minimum(room, limits - before - 1), vocab_size)


def grid_batch(state: DeviceState, grid: Grid) -> ForwardBatch:
    """What the model runs over for `grid`. Reads the page table."""
    rows, width, positions = grid.rows, grid.width, grid.positions
    slots = state.pool.slots(rows[:, None].expand(-1, width).reshape(-1), positions)
    return ForwardBatch(
        # To a model they are chunks, each behind what is in the pools.
        mode=ForwardMode.EXTEND,
        input_ids=grid.ids.view(-1),
        positions=positions,
        rows=rows,
        seq_lens=grid.before + grid.tried,
        out_cache_loc=slots * grid.mask.view(-1),
        last_indices=torch.arange(len(positions), device=rows.device),
        req_to_token=state.pool.table,
        kv_pool=state.kv_pool,
        num_extend=len(rows),
        prefix_lens_host=NO_LENGTHS,
        extend_lens_host=np.full(len(rows), width),
        verifies=True,
        grid_width=width,
        prefix_lens=grid.before,
    )
