"""An embedding at the engine's door: the request as the shared entry takes it, and the vector as the client asked."""

from __future__ import annotations

import numpy as np

from core.types.io import EmbedRequest, EmbedResult, GenerateRequest
from core.types.request import Req
from core.types.sampling_params import SamplingParams


def as_generation(request: EmbedRequest, new_id: str) -> GenerateRequest:
    """What tokenising, queueing and ending need to know of `request`; `new_id` is used if it names none."""
    return GenerateRequest(
        request_id=request.request_id or new_id,
        text=request.text,
        token_ids=request.token_ids,
        sampling=SamplingParams(temperature=0.0),
        want_text=False,
        priority=request.priority,
        queue_timeout=request.queue_timeout,
        deadline=request.deadline,
        cache_salt=request.cache_salt,
    )


def embed_result(request: EmbedRequest, req: Req) -> EmbedResult:
    """The vector of an ended `req`, cut to `dimensions` and then normalised, in float32. Zero stays zero."""
    assert req.vector is not None, "an embedding that ended well has its vector"
    vector = req.vector[: request.dimensions]
    norm = float(np.linalg.norm(vector))
    if request.normalize and norm > 0:
        vector = vector / norm
    return EmbedResult(req.request_id, tuple(vector.tolist()), req.prompt_len, req.cached_tokens)
