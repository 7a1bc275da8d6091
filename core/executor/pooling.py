"""Turns the hidden states of an embedding request into one vector, over as many chunks as its prompt takes."""

from __future__ import annotations

import torch

from core.batch.pooling_batch import PooledSegment, PoolingBatch
from core.memory.req_to_token_pool import ReqToTokenPool
from core.types.io import Pooling


class Pooler:
    """Keeps for each row what the earlier chunks of its prompt add to its vector. Forward stream only (law 2).

    A segment at position 0 starts afresh, so nothing remains of the row's former owner or of a request that was
    retracted halfway.
    """

    def __init__(self, pool: ReqToTokenPool, hidden_size: int) -> None:
        self._pool = pool
        self._hidden_size = hidden_size
        self._partial: torch.Tensor | None = None

    def pool(self, hidden: torch.Tensor, batch: PoolingBatch) -> torch.Tensor:
        """float32[E, H]: one vector per row of `batch.rows`. `hidden`: [T, H], of all tokens of the step."""
        assert hidden.shape[1] == self._hidden_size, (hidden.shape, self._hidden_size)
        if self._partial is None:
            # Rows x hidden size: allocated with the first embedding request.
            self._partial = self._pool.new_row_buffer((self._hidden_size,), torch.float32)
        done: list[torch.Tensor] = []
        for segment in batch.segments:
            state = self._advance(hidden, segment, self._partial)
            if segment.final:
                done.append(state)
        return torch.stack(done) if done else hidden.new_zeros(0, self._hidden_size, dtype=torch.float32)

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
