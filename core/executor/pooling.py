"""Turns the hidden states of an embedding request into one vector, over as many chunks as its prompt takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from core.batch.pooling_batch import PooledSegment, PoolingBatch
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory
from core.device.staging import Staging
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import LabelHead
from core.types.io import Pooling


class Pooler:
    """Keeps for each row what the earlier chunks of its prompt add to its vector. Forward stream only (law 2).

    A segment at position 0 starts afresh, so nothing remains of the row's former owner or of a request that was
    retracted halfway. What a step has of one kind is computed at once: one by one 128 short texts took 4 ms, not 1.
    """

    def __init__(self, pool: ReqToTokenPool, head: LabelHead | None = None) -> None:
        """`head`: of a model that judges."""
        self._pool, self._head = pool, head
        self._partial: torch.Tensor | None = None

    def vectors(self, hidden: torch.Tensor | None, batch: PoolingBatch | None, staging: Staging) -> torch.Tensor | None:
        """As `pool`; None without embeddings in the step, or without memory for them.

        For lack of memory the embeddings of the step end; its tokens do not depend on them (decision 25).
        """
        if batch is None:
            return None
        assert hidden is not None, "the engine lets embeddings in only for a model that gives hidden states"
        try:
            return self.pool(hidden, batch, staging)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            return None

    def pool(self, hidden: torch.Tensor, batch: PoolingBatch, staging: Staging) -> torch.Tensor:
        """float32[E, W]: one vector per row of `batch.rows`. `hidden`: [T, H], of all tokens of the step.

        W is H, or the number of labels if that is more; what is shorter ends with zeros.
        """
        if self._partial is None:
            # Rows x hidden size: allocated with the first embedding request.
            self._partial = self._pool.new_row_buffer((hidden.shape[1],), torch.float32)
        assert hidden.shape[1:] == self._partial.shape[1:], (hidden.shape, self._partial.shape)
        width = max(hidden.shape[1], 0 if self._head is None else self._head.count)
        kinds = dict.fromkeys(segment.pooling for segment in batch.segments)
        found = {kind: self._found(kind, hidden, batch, self._partial, staging) for kind in kinds}
        if len(found) == 1:
            (vectors,) = found.values()
            return functional.pad(vectors, (0, width - vectors.shape[1]))
        vectors = hidden.new_zeros(len(batch.rows), width, dtype=torch.float32)
        left = {kind: iter(each) for kind, each in found.items()}
        for place, segment in enumerate(each for each in batch.segments if each.final):
            vector = next(left[segment.pooling])
            vectors[place, : len(vector)] = vector
        return vectors

    def _found(
        self, kind: Pooling, hidden: torch.Tensor, batch: PoolingBatch, partial: torch.Tensor, staging: Staging
    ) -> torch.Tensor:
        """float32[e, H or L]: of the prompts of `kind` that end in the step, in batch order."""
        segments = [each for each in batch.segments if each.pooling is kind]
        if kind is not Pooling.LABELS:
            return self._advance(hidden, segments, partial, staging)
        ends = [each for each in segments if each.final]
        if not ends:
            return hidden.new_zeros(0, 0, dtype=torch.float32)
        assert self._head is not None, "the engine lets such requests in only for a model with labels"
        return self._head.label(hidden, [each.start for each in ends], [each.end for each in ends])

    def _advance(
        self, hidden: torch.Tensor, segments: Sequence[PooledSegment], partial: torch.Tensor, staging: Staging
    ) -> torch.Tensor:
        """Add `segments`, all of one kind; float32[e, H]: the vectors of prompts that end, the rest is kept."""
        kind = segments[0].pooling
        states = _STATES[kind](hidden, segments, staging)
        for state, segment in zip(states, segments, strict=True) if any(map(_is_part, segments)) else ():
            if segment.prefix:
                state.copy_(_JOINED[kind](state, partial[segment.row]))
            if not segment.final:
                partial[segment.row].copy_(state)
        if kind is Pooling.MEAN:
            counts = np.array([each.prefix + each.end - each.start for each in segments], np.float32)
            states = states / staging.upload([counts])[0][:, None]
        final = np.flatnonzero([each.final for each in segments])
        return states if len(final) == len(segments) else states.index_select(0, staging.upload([final])[0])


def _is_part(segment: PooledSegment) -> bool:
    return not segment.final or segment.prefix > 0


def _sums(hidden: torch.Tensor, segments: Sequence[PooledSegment], staging: Staging) -> torch.Tensor:
    # Runs of tokens: before each segment, and its own. What is behind the last one counts nowhere.
    bounds = np.array([bound for each in segments for bound in (each.start, each.end)])
    (lengths,) = staging.upload([np.diff(bounds, prepend=0)])
    # Unchecked, since the check would wait for the device.
    sums = torch.segment_reduce(hidden[: segments[-1].end].float(), "sum", lengths=lengths, unsafe=True)
    return sums[1::2]


def _firsts(hidden: torch.Tensor, segments: Sequence[PooledSegment], staging: Staging) -> torch.Tensor:
    return _taken(hidden, [each.start for each in segments], staging)


def _lasts(hidden: torch.Tensor, segments: Sequence[PooledSegment], staging: Staging) -> torch.Tensor:
    return _taken(hidden, [each.end - 1 for each in segments], staging)


def _taken(hidden: torch.Tensor, places: list[int], staging: Staging) -> torch.Tensor:
    return hidden.index_select(0, staging.upload([np.array(places)])[0]).float()


_STATES: Final[Mapping[Pooling, Callable[[torch.Tensor, Sequence[PooledSegment], Staging], torch.Tensor]]] = {
    Pooling.MEAN: _sums,
    Pooling.CLS: _firsts,
    Pooling.LAST: _lasts,
}
"""(hidden states, [T, H]; segments; staging) -> float32[n, H]: what each segment adds by itself."""

_JOINED: Final[Mapping[Pooling, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    Pooling.MEAN: torch.add,
    Pooling.CLS: lambda _, earlier: earlier,
    Pooling.LAST: lambda own, _: own,
}
"""(float32[H] of a segment, float32[H] kept of earlier ones) -> float32[H] up to the segment's end."""
