"""What Classify and Score say, as the client tells it, and the messages that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from service.pb.slipstream.v1 import inference_pb2 as pb

Judged = str | Sequence[int] | tuple[str, str]
"""A text, token ids, or a pair of texts."""


@dataclass(frozen=True, slots=True)
class LabelScore:
    """How well a label fits."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Classification:
    """The scores of one input, in the order of the model's labels."""

    scores: tuple[LabelScore, ...]
    prompt_tokens: int
    cached_tokens: int

    @property
    def best(self) -> LabelScore:
        """The label that fits best; the first of them if several do."""
        return max(self.scores, key=lambda each: each.score)


@dataclass(frozen=True, slots=True)
class DocumentScore:
    """How well a document answers the query; `index` is its place among those that were given."""

    index: int
    score: float
    prompt_tokens: int
    cached_tokens: int


def classify_request(inputs: Sequence[Judged], **fields: Any) -> pb.ClassifyRequest:
    """The message that has `inputs` judged. Raises TypeError as `classify_input`."""
    return pb.ClassifyRequest(inputs=[classify_input(each) for each in inputs], **fields)


def score_request(query: str, documents: Sequence[str], **fields: Any) -> pb.ScoreRequest:
    """The message that has `documents` compared with `query`. Raises TypeError for one text instead of a list."""
    if isinstance(documents, str):
        raise TypeError("documents must be a list of texts, not one text")
    return pb.ScoreRequest(query=query, documents=documents, **fields)


def classify_input(given: Judged) -> pb.ClassifyInput:
    """The message of one input. Raises TypeError for a list of texts, which would be read as a pair, and other ones."""
    if isinstance(given, str):
        return pb.ClassifyInput(text=given)
    if given and all(isinstance(each, str) for each in given):
        if not isinstance(given, tuple) or len(given) != 2:
            raise TypeError("a pair is a tuple of two texts; several texts are several arguments: classify(*texts)")
        first, second = given
        return pb.ClassifyInput(pair=pb.TextPair(first=str(first), second=str(second)))
    ids: Sequence[int] = given  # type: ignore[assignment]
    return pb.ClassifyInput(token_ids=pb.TokenIds(ids=ids))


def classifications(response: pb.ClassifyResponse) -> list[Classification]:
    """What `response` says of the inputs, in their order."""
    return [
        Classification(
            tuple(LabelScore(found.label, found.score) for found in each.scores),
            each.usage.prompt_tokens,
            each.usage.cached_tokens,
        )
        for each in response.results
    ]


def document_scores(response: pb.ScoreResponse) -> list[DocumentScore]:
    """What `response` says of documents, in its order."""
    return [
        DocumentScore(each.index, each.score, each.usage.prompt_tokens, each.usage.cached_tokens)
        for each in response.results
    ]
