"""Embedding requests: queued as a generation is, and answered with vectors in the form that the client asked for."""

from __future__ import annotations

import math

import numpy as np

from core.engine.streams.token_stream import TokenStream
from core.errors import RequestAborted
from core.types.io import Embedding, EmbedRequest, EmbedResult, Finished, FinishReason, GenerateRequest
from core.types.request import Req
from core.types.sampling_params import SamplingParams


def as_generation(request: EmbedRequest) -> GenerateRequest:
    """`request` as queueing and ending see it: each of its inputs counts as one output."""
    return GenerateRequest(
        sampling=SamplingParams(temperature=0.0, n=len(request.inputs)),
        want_text=False,
        deadline=request.deadline,
        tenant=request.tenant,
    )


class EmbeddingCall:
    """The engine's `EmbedCall` (see `core.engine.api`): a stream without tokens, read to its end."""

    def __init__(self, request: EmbedRequest, stream: TokenStream, size: int, labels: int | None = None) -> None:
        """`size`: of the model's hidden states. `labels`: how many there are, where the inputs are judged."""
        self.request_id = stream.request_id
        self._size, self._labels = size, labels
        self._request = request
        self._stream = stream

    async def result(self) -> EmbedResult:
        """Wait for every vector, in the order of the inputs. Raises what the stream raises, and RequestAborted."""
        aborted = False
        async for event in self._stream:
            # Read on, even past a cancelled input: the error that made its siblings end as cancelled comes last.
            aborted |= isinstance(event, Finished) and event.reason is FinishReason.CANCELLED
        if aborted:
            raise RequestAborted("the request was aborted")
        found = (embedding(self._request, req, self._size, self._labels) for req in self._stream.reqs)
        return EmbedResult(self.request_id, tuple(found))

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        await self._stream.aclose()


def embedding(request: EmbedRequest, req: Req, size: int, labels: int | None) -> Embedding:
    """The vector of `req`, which has ended: float32[D], cut to `dimensions`, then normalised. Zero stays zero.

    `size`: of the model's hidden states. `labels`: how many numbers it has of a request that is judged.
    """
    assert req.vector is not None, "an embedding that ended well has its vector"
    if labels is not None:
        return Embedding(req.vector[:labels], req.prompt_len, req.cached_tokens)
    vector = req.vector[: request.dimensions or size]
    if request.normalize:
        # In float64: squares of finite float32 entries can pass the range of float32.
        wide = vector.astype(np.float64)
        norm = math.sqrt(wide @ wide)
        if norm > 0:
            vector = (wide / norm).astype(np.float32)
    return Embedding(vector, req.prompt_len, req.cached_tokens)
