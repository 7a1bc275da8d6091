"""Which prompt chunks of one step belong to embeddings, and how their hidden states become one vector."""

from __future__ import annotations

from dataclasses import dataclass

from core.types.arrays import Ints
from core.types.io import Pooling


@dataclass(frozen=True, slots=True)
class PooledSegment:
    """Tokens `start:end` of the packed row: the tokens of the request in `row` from position `prefix` on."""

    row: int
    start: int
    end: int
    prefix: int
    pooling: Pooling
    final: bool
    """The prompt ends here, so the step's results carry its vector."""


@dataclass(frozen=True, slots=True)
class PoolingBatch:
    """The embedding segments of a step in batch order, and the owners of the vectors that it completes."""

    segments: tuple[PooledSegment, ...]
    rows: Ints
    """int64[E]: rows whose vector this step completes."""
    generations: Ints
    """int64[E]: the generations of `rows`."""
