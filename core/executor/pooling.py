"""Turns the hidden states of an embedding request into one vector, over as many chunks as its prompt takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from core.batch.pooling_batch import PooledSegment, PoolingBatch
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import LabelHead
from core.types.io import Pooling


class Pooler:
    """Keeps for each row what the earlier chunks of its prompt add to its vector. Forward stream only (law 2).

    A segment at position 0 starts afresh, so nothing remains of the row's former owner or of a request that was
    retracted halfway.
    """

    def __init__(self, pool: ReqToTokenPool, head: LabelHead | None = None) -> None:
        """`head`: of a model that judges."""
        self._pool, self._head = pool, head
        self._partial: torch.Tensor | None = None

    def vectors(self, hidden: torch.Tensor | None, batch: PoolingBatch | None) -> torch.Tensor | None:
        """As `pool`; None without embeddings in the step, or without memory for them.

        For lack of memory the embeddings of the step end; its tokens do not depend on them (decision 25).
        """
        if batch is None:
            return None
        assert hidden is not None, "the engine lets embeddings in only for a model that gives hidden states"
        try:
            return self.pool(hidden, batch)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            return None

    def pool(self, hidden: torch.Tensor, batch: PoolingBatch) -> torch.Tensor:
        """float32[E, W]: one vector per row of `batch.rows`. `hidden`: [T, H], of all tokens of the step.

        W is H, or the number of labels if that is more; what is shorter ends with zeros.
        """
        if self._partial is None:
            # Rows x hidden size: allocated with the first embedding request.
            self._partial = self._pool.new_row_buffer((hidden.shape[1],), torch.float32)
        assert hidden.shape[1:] == self._partial.shape[1:], (hidden.shape, self._partial.shape)
        width = max(hidden.shape[1], 0 if self._head is None else self._head.count)
        judged = self._judged(hidden, batch)
        done: list[torch.Tensor] = []
        for segment in batch.segments:
            if segment.pooling is Pooling.LABELS:
                vector = next(judged) if segment.final else None
            else:
                state = self._advance(hidden, segment, self._partial)
                vector = state if segment.final else None
            if vector is not None:
                done.append(functional.pad(vector, (0, width - len(vector))))
        return torch.stack(done) if done else hidden.new_zeros(0, width, dtype=torch.float32)

    def _judged(self, hidden: torch.Tensor, batch: PoolingBatch) -> Iterator[torch.Tensor]:
        """float32[L] of each prompt that ends in the step and is judged, in batch order."""
        ends = [each for each in batch.segments if each.pooling is Pooling.LABELS and each.final]
        if not ends:
            return iter(())
        assert self._head is not None, "the engine lets such requests in only for a model with labels"
        return iter(self._head.label(hidden, [each.start for each in ends], [each.end for each in ends]))

    def _advance(self, hidden: torch.Tensor, segment: PooledSegment, partial: torch.Tensor) -> torch.Tensor:
        """Add one segment; float32[H]: the vector if its prompt ends here, else what was kept of it."""
        earlier = partial[segment.row] if segment.prefix else None
        state = _STATES[segment.pooling](hidden[segment.start : segment.end].float(), earlier)
        if not segment.final:
            partial[segment.row].copy_(state)
            return state
        return state / (segment.prefix + segment.end - segment.start) if segment.pooling is Pooling.MEAN else state


def _summed(part: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    return part.sum(0) if earlier is None else earlier + part.sum(0)


def _first(part: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    return part[0] if earlier is None else earlier


def _last(part: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    return part[-1]


_STATES = {Pooling.MEAN: _summed, Pooling.CLS: _first, Pooling.LAST: _last}
"""(float32[n, H] of a segment, float32[H] kept of earlier ones or None) -> float32[H] up to the segment's end."""
