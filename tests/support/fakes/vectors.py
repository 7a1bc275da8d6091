"""The vectors that the fake engine makes of inputs."""

from __future__ import annotations

import numpy as np

from core.types.io import Embedding, EmbedRequest, Input, Pooling, TextPair


def vectors_of(asked: EmbedRequest, dimension: int) -> tuple[Embedding, ...]:
    """Vectors that repeat four numbers: length and place of the input, whether it is normalised, its pooling.

    A character is a token. One token of each input came from the cache.
    """
    lengths = [_length(given) for given in asked.inputs]
    last = [float(asked.normalize), list(Pooling).index(asked.pooling)]
    rows = [np.array([length, place, *last], np.float32) for place, length in enumerate(lengths)]
    vectors = [np.resize(row, dimension)[: asked.dimensions] for row in rows]
    return tuple(Embedding(vector, length, 1) for vector, length in zip(vectors, lengths, strict=True))


def _length(given: Input) -> int:
    return len(given.first) + len(given.second) if isinstance(given, TextPair) else len(given)
