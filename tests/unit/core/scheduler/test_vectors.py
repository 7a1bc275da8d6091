"""Embeddings in the steps of others: their vectors reach the request that asked, and no token is sampled for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from core.batch.result import StepResult, VectorResult
from core.types.io import FinishReason, Pooling
from tests.unit.core.scheduler.harness import Harness


def give_vectors(harness: Harness) -> list[float]:
    """Steps with embeddings yield one vector each, the step's number; those given so far."""
    given: list[float] = []

    def embed(result: StepResult) -> StepResult:
        pooling = harness.executor.batches[result.step_id - 1].pooling
        if pooling is None:
            return result
        given.append(float(result.step_id))
        return replace(result, vectors=VectorResult(pooling.rows, pooling.generations, np.full((1, 2), given[-1])))

    harness.executor.mutate = embed
    return given


def test_a_vector_of_the_former_owner_is_dropped() -> None:
    """An embedding that left while its step was in flight: the next owner of its row gets its own vector."""
    harness = Harness(rows=1, pages=16)
    vectors = give_vectors(harness)
    first, second = harness.add([1, 2, 3], max_tokens=1), harness.add([9, 8, 7], max_tokens=1)
    for req in (first, second):
        req.pooling, req.max_new_tokens = Pooling.LAST, 0
    harness.step(run=False)
    harness.end(first)
    harness.step(run=False)
    harness.drain()
    assert first.vector is None and harness.seen[first].reason is FinishReason.CANCELLED
    assert len(vectors) == 2 and second.vector is not None and second.vector[0] == vectors[1]


def test_no_token_is_sampled_for_an_embedding() -> None:
    """The request beside it, prefilled in the same step, is the only one of which tokens are sampled."""
    harness = Harness(rows=2, pages=16)
    embedding, beside = harness.add([1, 2, 3], max_tokens=1), harness.add([9, 8], max_tokens=4)
    embedding.pooling, embedding.max_new_tokens = Pooling.LAST, 0
    vectors = give_vectors(harness)
    harness.drain()
    assert len(vectors) == 1 and embedding.vector is not None
    pooled = [batch for batch in harness.executor.batches if batch.pooling is not None]
    assert len(pooled) == 1 and len(pooled[0].rows) == 2
    sampled = sum(len(batch.sample_indices) for batch in harness.executor.batches)
    assert sampled == 4 and harness.seen[beside].reason is FinishReason.LENGTH
