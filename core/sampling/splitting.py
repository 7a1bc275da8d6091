"""Samples the rows of a step a few at a time, when memory for all at once is short.

A row's token is a function of its own logits, options and uniform (law 13), so pieces give the same tokens. A piece
that does not fit is halved. A row is given up in two cases only: it does not fit alone, or the log probabilities that
it wants do not fit into the step's output, which is allocated before any piece is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from core.batch.grammar_batch import TokenMask
from core.batch.sampling_batch import PER_ROW, SamplingBatch
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory
from core.sampling.penalties import TokenHistory, has_penalty
from core.sampling.sampler import SampleOutput, Sampler, Scored
from core.types.arrays import Ints

T = TypeVar("T")
Columns = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What S rows sampled, piece by piece."""

    output: SampleOutput
    given_up: Ints
    """int64[n], ascending: the places among S of rows that were given up; their tokens are 0 and mean nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start:start + len(batch)` of a step, and how far their sampling has come."""

    start: int
    scored: Scored
    batch: SamplingBatch
    mask: TokenMask | None

    def part(self, first: int, last: int) -> Piece:
        """Rows [first, last) of this piece; the tensors are views."""
        mask = None if self.mask is None else rows_of_mask(self.mask, first, last)
        rows = rows_of(self.batch, first, last)
        scored = self.scored.part(slice(first, last))
        # Alternatives are best first, so a view has the best of them. Without `raw` the sampler computes no log
        # probabilities.
        scored.raw = scored.raw if rows.logprobs else None
        scored.chosen = None if rows.chosen is None else scored.chosen
        for name in ("top_ids", "top_values"):
            held = getattr(scored, name)
            if held is not None:
                setattr(scored, name, held[:, : rows.top_logprobs] if rows.top_logprobs else None)
        return Piece(self.start + first, scored, rows, mask)


def sample_in_pieces(
    sampler: Sampler,
    scored: Scored,
    batch: SamplingBatch,
    history: TokenHistory | None,
    mask: TokenMask | None,
) -> Pieces:
    """Sample the rows of `scored`, from wherever an earlier attempt stopped.

    Raises a lack of memory only if the tokens of all rows (9 bytes each) cannot be allocated, and every other error.
    After that nothing is allocated outside of an attempt: the tokens of a piece are written to their places, and a row
    that is given up keeps its zeros.
    """
    wanted = _wanted(batch)
    output, width = _room(scored.logits, wanted, batch.chosen)
    whole, given_up = Piece(0, scored, batch, mask), np.flatnonzero(wanted > width).tolist()
    todo = [whole.part(first, last) for first, last in reversed(_runs(wanted <= width))]
    while todo:
        piece = todo.pop()
        sampled = _if_it_fits(partial(_sampled, sampler, piece, history))
        count = len(piece.batch)
        if sampled is not None:
            _put(output, piece.start, sampled)
        elif count > 1:
            half = count // 2
            todo += [piece.part(half, count), piece.part(0, half)]
        else:
            given_up.append(piece.start)
    return Pieces(output, np.sort(np.array(given_up, np.int64)))


def rows_of(batch: SamplingBatch, first: int, last: int) -> SamplingBatch:
    """The options of rows [first, last). Options that none of these rows uses are off, so they take no memory."""
    columns = {name: getattr(batch, name)[first:last] for name in PER_ROW}
    random = columns["temperatures"] > 0
    biased = (batch.bias_rows >= first) & (batch.bias_rows < last)
    constrained = batch.constrained[(batch.constrained >= first) & (batch.constrained < last)]
    wanted = _wanted(batch)[first:last]
    part = replace(
        batch,
        **columns,
        bias_rows=batch.bias_rows[biased] - first,
        bias_tokens=batch.bias_tokens[biased],
        bias_values=batch.bias_values[biased],
        bias_from=batch.bias_from[biased],
        bias_until=batch.bias_until[biased],
        all_greedy=not random.any(),
        any_top_k=bool((random & (columns["top_ks"] > 0)).any()),
        any_top_p=bool((random & (columns["top_ps"] < 1)).any()),
        any_min_p=bool((random & (columns["min_ps"] > 0)).any()),
        logprobs=bool((wanted >= 0).any()),
        top_logprobs=int(wanted.max(initial=0)),
        constrained=constrained - first,
        alternatives=wanted if batch.logprobs else None,
        chosen=batch.chosen[first:last] if batch.chosen is not None and (wanted >= 0).any() else None,
    )
    return replace(part, any_penalty=bool(has_penalty(part).any()))


def rows_of_mask(mask: TokenMask, first: int, last: int) -> TokenMask:
    """The masks of rows [first, last). The words are views: memory is short, and a copy might not fit."""
    start, end = np.searchsorted(mask.places, (first, last)).tolist()
    return TokenMask(mask.places[start:end] - first, mask.words[start:end])


def _wanted(batch: SamplingBatch) -> Ints:
    """int64[S]: how many alternatives each row wants, -1 where it wants no log probability at all."""
    if not batch.logprobs:
        return np.full(len(batch), -1)
    return np.full(len(batch), batch.top_logprobs) if batch.alternatives is None else batch.alternatives


def _runs(served: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[first, last) of each run of True, in order."""
    edges = np.flatnonzero(np.diff(served, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _room(logits: torch.Tensor, wanted: Ints, chosen: Ints | None) -> tuple[SampleOutput, int]:
    """An output of zeros for S rows, and how many alternatives per row it has room for; -1: not even log probabilities.

    Every row gets the width of the row that wants most, so where memory is short that row is given up first.
    """
    tokens = logits.new_zeros(len(logits), dtype=torch.int64)
    non_finite = logits.new_zeros(len(logits), dtype=torch.bool)
    for width in sorted({*wanted[wanted >= 0].tolist()}, reverse=True):
        columns = _if_it_fits(partial(_columns, logits, width, 0 if chosen is None else chosen.shape[1]))
        if columns is not None:
            return SampleOutput(tokens, non_finite, *columns), width
    return SampleOutput(tokens, non_finite, None, None, None), -1


def _columns(logits: torch.Tensor, width: int, chosen: int) -> Columns:
    """Log probabilities float32[S], ids int64[S, K] and values float32[S, K] of alternatives, values of chosen ids
    float32[S, C]; K at most V. None for what is empty."""
    logprobs, told = logits.new_zeros(len(logits)), logits.new_zeros(len(logits), chosen) if chosen else None
    if width == 0:
        return logprobs, None, None, told
    shape = (len(logits), min(width, logits.shape[1]))
    return logprobs, logits.new_zeros(shape, dtype=torch.int64), logits.new_zeros(shape), told


def _sampled(sampler: Sampler, piece: Piece, history: TokenHistory | None) -> SampleOutput:
    sampler.score_on(piece.scored, piece.batch, history)
    return sampler.pick(piece.scored, piece.batch, piece.mask)


def _if_it_fits(work: Callable[[], T]) -> T | None:
    """The result of `work`, or None if memory was short. Its memory is free then, since the traceback is gone."""
    try:
        return work()
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        return None


def _put(output: SampleOutput, start: int, sampled: SampleOutput) -> None:
    """Write `sampled` to the rows from `start` on, without an allocation; alternatives it does not have stay zero."""
    places = slice(start, start + len(sampled.tokens))
    output.tokens[places] = sampled.tokens
    output.non_finite[places] = sampled.non_finite
    if sampled.logprobs is not None:
        assert output.logprobs is not None, "a row was served that there is no room for"
        output.logprobs[places] = sampled.logprobs
    if sampled.top_ids is not None and sampled.top_values is not None:
        assert output.top_ids is not None and output.top_values is not None, "no room for alternatives"
        output.top_ids[places, : sampled.top_ids.shape[1]] = sampled.top_ids
        output.top_values[places, : sampled.top_ids.shape[1]] = sampled.top_values
    if sampled.chosen is not None:
        assert output.chosen is not None, "no room for chosen ids"
        output.chosen[places] = sampled.chosen
