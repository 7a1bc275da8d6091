"""Samples the rows of a step a few at a time, when memory for all at once is short.

A row's token is a function of its own logits, options and uniform (law 13), so pieces give the same tokens. Which rows
are a piece is found by halving those that did not fit. A row that does not fit alone is given up, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from core.batch.grammar_batch import TokenMask
from core.batch.sampling_batch import SamplingBatch
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory
from core.sampling.penalties import TokenHistory, has_penalty
from core.sampling.sampler import SampleOutput, Sampler, Scored
from core.types.arrays import Ints

_ROW_FIELDS = (
    *("rows", "temperatures", "top_ks", "top_ps", "min_ps", "uniforms", "prompt_lens", "history_lens"),
    *("repetition_penalties", "frequency_penalties", "presence_penalties"),
)
"""Arrays with one entry per row."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What S rows sampled, piece by piece."""

    output: SampleOutput
    given_up: Ints
    """int64[n]: the places among S whose rows did not fit alone; their tokens are 0 and mean nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start:start + len(batch)` of a step, and how far they have come."""

    start: int
    scored: Scored
    batch: SamplingBatch
    mask: TokenMask | None

    def part(self, first: int, last: int) -> Piece:
        """Rows [first, last) of this piece; the tensors are views."""
        places = slice(first, last)
        mask = None if self.mask is None else rows_of_mask(self.mask, first, last)
        rows = rows_of(self.batch, first, last)
        return Piece(self.start + first, self.scored.part(places), rows, mask)


def sample_in_pieces(
    sampler: Sampler,
    scored: Scored,
    batch: SamplingBatch,
    history: TokenHistory | None,
    mask: TokenMask | None,
) -> Pieces:
    """Take the rows of `scored` from wherever they stopped to their tokens. Raises what is no lack of memory."""
    todo, outputs, given_up = [Piece(0, scored, batch, mask)], list[SampleOutput](), list[int]()
    while todo:
        piece = todo.pop()
        output = _tried(sampler, piece, history)
        count = len(piece.batch)
        if output is not None:
            outputs.append(output)
        elif count > 1:
            half = count // 2
            todo += [piece.part(half, count), piece.part(0, half)]
        else:
            given_up.append(piece.start)
            outputs.append(_nothing(sampler))
    return Pieces(_joined(outputs, batch, sampler.vocab_size), np.array(given_up, np.int64))


def rows_of(batch: SamplingBatch, first: int, last: int) -> SamplingBatch:
    """The options of rows [first, last); what none of these rows asks for costs them no memory either."""
    columns = {name: getattr(batch, name)[first:last] for name in _ROW_FIELDS}
    random = columns["temperatures"] > 0
    biased = (batch.bias_rows >= first) & (batch.bias_rows < last)
    constrained = batch.constrained[(batch.constrained >= first) & (batch.constrained < last)]
    wanted = np.full(len(random), batch.top_logprobs) if batch.alternatives is None else batch.alternatives[first:last]
    part = replace(
        batch,
        **columns,
        bias_rows=batch.bias_rows[biased] - first,
        bias_tokens=batch.bias_tokens[biased],
        bias_values=batch.bias_values[biased],
        all_greedy=not random.any(),
        any_top_k=bool((random & (columns["top_ks"] > 0)).any()),
        any_top_p=bool((random & (columns["top_ps"] < 1)).any()),
        any_min_p=bool((random & (columns["min_ps"] > 0)).any()),
        logprobs=batch.logprobs and bool((wanted >= 0).any()),
        top_logprobs=int(wanted.max(initial=0)),
        constrained=constrained - first,
        alternatives=wanted if batch.logprobs else None,
    )
    return replace(part, any_penalty=bool(has_penalty(part).any()))


def rows_of_mask(mask: TokenMask, first: int, last: int) -> TokenMask:
    """The masks of rows [first, last)."""
    inside = (mask.places >= first) & (mask.places < last)
    return TokenMask(mask.places[inside] - first, mask.words[inside])


def _tried(sampler: Sampler, piece: Piece, history: TokenHistory | None) -> SampleOutput | None:
    """None if memory was short. What the attempt held is free once this returns: its traceback is gone."""
    try:
        sampler.score_on(piece.scored, piece.batch, history)
        return sampler.pick(piece.scored, piece.batch, piece.mask)
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        return None


def _nothing(sampler: Sampler) -> SampleOutput:
    """The output of one row that was given up."""
    tokens = torch.zeros(1, dtype=torch.int64, device=sampler.device)
    return SampleOutput(tokens, tokens.bool(), None, None, None)


def _joined(outputs: Sequence[SampleOutput], batch: SamplingBatch, vocab_size: int) -> SampleOutput:
    """All rows in one; columns that a piece has none of, or is narrower in, are filled up with zeros."""
    if len(outputs) == 1 and (outputs[0].logprobs is not None or not batch.logprobs):
        return outputs[0]
    tokens = torch.cat([output.tokens for output in outputs])
    non_finite = torch.cat([output.non_finite for output in outputs])
    if not batch.logprobs:
        return SampleOutput(tokens, non_finite, None, None, None)
    logprobs = tokens.new_zeros(len(tokens), dtype=torch.float32)
    width = min(batch.top_logprobs, vocab_size)
    ids, values = tokens.new_zeros(len(tokens), width), logprobs.new_zeros(len(tokens), width)
    start = 0
    for output in outputs:
        places = slice(start, start + len(output.tokens))
        start = places.stop
        if output.logprobs is not None:
            logprobs[places] = output.logprobs
        if output.top_ids is not None and output.top_values is not None:
            ids[places, : output.top_ids.shape[1]] = output.top_ids
            values[places, : output.top_ids.shape[1]] = output.top_values
    return SampleOutput(tokens, non_finite, logprobs, ids if width else None, values if width else None)
