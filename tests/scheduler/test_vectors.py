"""Vectors of embeddings reach the request that asked, whichever has its row by then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from core.batch.result import StepResult, VectorResult
from core.types.io import FinishReason, Pooling
from tests.scheduler.harness import Harness


def test_a_vector_of_the_former_owner_is_dropped() -> None:
    """An embedding that left while its step was in flight: the next owner of its row gets its own vector."""
    harness = Harness(rows=1, pages=16)
    vectors: list[float] = []

    def embed(result: StepResult) -> StepResult:
        pooling = harness.executor.batches[result.step_id - 1].pooling
        if pooling is None:
            return result
        vectors.append(float(result.step_id))
        return replace(result, vectors=VectorResult(pooling.rows, pooling.generations, np.full((1, 2), vectors[-1])))

    harness.executor.mutate = embed
    first, second = harness.add([1, 2, 3], max_tokens=1), harness.add([9, 8, 7], max_tokens=1)
    for req in (first, second):
        req.pooling, req.max_new_tokens = Pooling.LAST, 0
    harness.step(run=False)
    harness.end(first)
    harness.step(run=False)
    harness.drain()
    assert first.vector is None and harness.seen[first].reason is FinishReason.CANCELLED
    assert len(vectors) == 2 and second.vector is not None and second.vector[0] == vectors[1]
