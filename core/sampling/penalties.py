"""Logit bias and the three penalties, from the device's own record of the tokens.

Under overlap the host plans a step before it knows the newest token, so counts kept on the host would be one token
late. The history is therefore written and read on the forward stream: a step appends what it sampled, the next step
counts what is there. Lengths are known there first too; the host knows bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from core.batch.ragged import walk_runs
from core.batch.sampling_batch import SamplingBatch
from core.device.recorder import Recorder
from core.device.staging import Staging
from core.types.arrays import Ints

MIN_REPETITION_PENALTY = 1e-6
"""Smaller penalties act as this one: as float32 they round to zero, or make a quotient that is not finite."""


class Beginnings(NamedTuple):
    """Every token that is known of some rows, int64[n] each."""

    rows: Ints
    positions: Ints
    """In the sequence of its row."""
    ids: Ints

    @classmethod
    def of(cls, rows: Sequence[int], ids: Sequence[Ints]) -> Beginnings:
        """Those of `rows[i]` are `ids[i]` (int64), from the first on."""
        assert len(rows) == len(ids), (len(rows), len(ids))
        lens = np.array([len(part) for part in ids], np.int64)
        run, behind = walk_runs(lens)
        return cls(np.asarray(rows, np.int64)[run], behind, np.concatenate([run[:0], *ids]))


class TokenHistory:
    """Prompt and output ids of every pool row that uses penalties: column p of row r is token p of its sequence.

    Called on the forward stream only (law 2). Columns at and beyond a row's length hold leftovers of earlier owners,
    which no result depends on. Row 0 is padding and takes every write that has no place.
    """

    def __init__(self, buffer: torch.Tensor, recorder: Recorder | None = None) -> None:
        """`buffer`: int32[R, max_len] on the device, one row per pool row including row 0."""
        assert buffer.ndim == 2 and buffer.dtype == torch.int32, (buffer.shape, buffer.dtype)
        self.buffer = buffer
        self.recorder = recorder
        self._staging = Staging(buffer.device)

    @property
    def max_len(self) -> int:
        """Tokens that a row can hold."""
        return self.buffer.shape[1]

    def seed(self, rows: Sequence[int], ids: Sequence[Ints]) -> None:
        """Start `rows[i]` with all its known tokens `ids[i]` (int64), prompt first. One transfer for all rows."""
        self.start(rows, Beginnings.of(rows, ids), self._staging)

    def start(self, rows: Sequence[int], known: Beginnings, staging: Staging) -> None:
        """As `seed`, from `known` of `rows`, whose arrays `staging` may have on the device already."""
        assert all(0 < row < len(self.buffer) for row in rows), rows
        assert (known.positions < self.max_len).all(), (known.positions.max(), self.max_len)
        if not len(known.ids):
            return
        if self.recorder is not None:
            self.recorder.wrote("token_history", rows)
        row_index, columns, tokens = staging.upload(known)
        self.buffer.index_put_((row_index, columns), tokens.to(torch.int32))

    def append(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write `tokens[i]` at `positions[i]` of `rows[i]`; int64[S] each, on the device, without a host sync.

        A position past the end (the discarded extra step of a request that filled its context) lands in row 0.
        """
        assert rows.shape == positions.shape == tokens.shape, (rows.shape, positions.shape, tokens.shape)
        if self.recorder is not None:
            self.recorder.wrote("token_history", rows)
        fits = positions < self.max_len
        self.buffer.index_put_((rows * fits, positions * fits), tokens.to(torch.int32))


def apply_bias(logits: torch.Tensor, batch: SamplingBatch, lens: torch.Tensor) -> None:
    """Add the batch's bias entries to float32[S, V] logits, in place; -inf forbids a token.

    `lens`, int64[S]: tokens before each place. An entry counts only where they are in its range.
    """
    if len(batch.bias_rows) == 0:
        return
    staging = Staging(logits.device)
    rows, tokens, first, end = staging.upload([batch.bias_rows, batch.bias_tokens, batch.bias_from, batch.bias_until])
    (values,) = staging.upload([batch.bias_values])
    places = lens.index_select(0, rows)
    values = values.masked_fill((places < first).logical_or_(places >= end), 0.0)
    # Accumulate: a token can carry a client's bias and the -inf of min_tokens at once.
    logits.index_put_((rows, tokens), values, accumulate=True)


def apply_penalties(logits: torch.Tensor, batch: SamplingBatch, lens: torch.Tensor, history: TokenHistory) -> None:
    """Penalise tokens seen so far, in place on float32[S, V] logits; rows without penalties are not touched.

    `lens`, int64[S]: tokens before each place, which is how many count.

    Repetition as in `transformers` and vLLM: over prompt and output, positive logits divided, negative multiplied.
    Frequency and presence as in OpenAI's API: over the output only, subtracted count times and once.
    """
    places = _penalised(batch)
    if len(places) == 0:
        return
    longest = int(batch.upper_lens[places].max())
    assert longest <= history.max_len, (longest, history.max_len)
    if history.recorder is not None:
        history.recorder.read("token_history", batch.rows[places])
    staging = Staging(logits.device)
    index, rows, prompt_lens = staging.upload([places, batch.rows[places], batch.prompt_lens[places]])
    repetition, frequency, presence = (
        column[:, None]
        for column in staging.upload(
            [
                np.maximum(batch.repetition_penalties[places], np.float32(MIN_REPETITION_PENALTY)),
                batch.frequency_penalties[places],
                batch.presence_penalties[places],
            ]
        )
    )
    columns = torch.arange(longest, device=logits.device)
    valid = columns < lens.index_select(0, index)[:, None]
    tokens = history.buffer[:, :longest].index_select(0, rows).long()
    # Leftovers beyond a row's length count for its first token with weight 0, and rewrite that token's own new logit.
    tokens = torch.where(valid, tokens, tokens[:, :1])
    counts = torch.zeros(len(places), logits.shape[1], device=logits.device)
    counts.scatter_add_(1, tokens, (valid & (columns >= prompt_lens[:, None])).float())
    seen = counts.gather(1, tokens)
    old = logits.index_select(0, index).gather(1, tokens)
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - frequency * seen - presence * (seen > 0)
    logits.index_put_((index[:, None].expand_as(tokens), tokens), new)


def has_penalty(batch: SamplingBatch) -> npt.NDArray[np.bool_]:
    """bool[S]: rows with a penalty that is on."""
    on: npt.NDArray[np.bool_] = (
        (batch.repetition_penalties != 1.0) | (batch.frequency_penalties != 0.0) | (batch.presence_penalties != 0.0)
    )
    return on


def _penalised(batch: SamplingBatch) -> Ints:
    """int64[n]: places in the batch of the rows whose logits a penalty changes."""
    return np.flatnonzero(has_penalty(batch) & (batch.upper_lens > 0))
