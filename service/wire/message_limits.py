"""How many members the collections of a message may have, checked by their sizes alone.

A message of 4 MiB has room for four million ids or two million empty messages. Copying or walking those would hold up
the event loop, and with it every other stream. So sizes are checked before anything is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.errors import FieldViolation, InvalidRequest
from core.types.constraint import MAX_CHOICES
from core.types.image import MAX_IMAGES
from core.types.io import ModelInfo
from core.types.labels import Labels
from core.types.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from core.types.structural_tags import MAX_TAGS
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.wire.packed import label_score_bytes

MAX_DETOKENIZE_IDS = 65_536
"""Most ids of one Detokenize call; the context length if that is more."""

MAX_TOOLS = 128
"""Most tools that one chat tells the model of."""
MAX_EMBED_INPUTS = 128
"""Most inputs of one Embed or Classify call, and documents of one Score call."""
MAX_EMBED_IDS = 131_072
"""Most ids of all inputs of one Embed or Classify call; the longest prompt if that is more."""
MAX_EMBED_NUMBERS = 786_432
"""Most numbers of all vectors of one Embed call: 3 MiB, where clients take messages of 4 MiB by default."""

MAX_LABEL_BYTES = 3 * 1024 * 1024
"""Most bytes of the labels and scores of one Classify call, for the same reason."""
MAX_SCORE_CHARS = 4 * 1024 * 1024
"""Most characters of a Score call with its query in front of each document, as it is tokenised: as many as a message
could have. 128 documents would make half a gigabyte of the longest query."""
MAX_QUERY_CHARS_PER_TOKEN = 64
"""The engine refuses longer prompts for their length alone. A query that is too long is one fault, not 128 of them."""


def refuse_oversized(message: pb.GenerateRequest, info: ModelInfo) -> None:
    """Raise InvalidRequest, which names every collection that is too large."""
    violations = list(_violations(message, info))
    if violations:
        raise InvalidRequest(violations)


def _violations(message: pb.GenerateRequest, info: ModelInfo) -> Iterator[FieldViolation]:
    kind, sampling = message.WhichOneof("input"), message.sampling_params
    ids = len(message.token_ids.ids) if kind == "token_ids" else 0
    turns = len(message.chat.messages) if kind == "chat" else 0
    # Those of turns that are too many anyway are not walked.
    walked = message.chat.messages if 0 < turns <= info.max_input_length else ()
    calls, parts = sum(len(turn.tool_calls) for turn in walked), sum(len(turn.parts) for turn in walked)
    tools = len(message.chat.tools) if kind == "chat" else 0
    constraint = message.constraint
    for name, count, limit, noun in (
        ("token_ids.ids", ids, info.max_input_length, "tokens"),
        # Each turn becomes at least one token in any template, and each call too: the token limit bounds both.
        ("chat.messages", turns, info.max_input_length, "messages"),
        ("chat.messages", calls, info.max_input_length, "tool calls"),
        ("chat.messages", parts, info.max_input_length, "parts"),
        ("chat.tools", tools, MAX_TOOLS, "tools"),
        ("images", len(message.images), MAX_IMAGES, "images"),
        ("sampling_params.stop", len(sampling.stop), MAX_STOP_STRINGS, "strings"),
        ("sampling_params.stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids"),
        ("sampling_params.logprob_token_ids", len(sampling.logprob_token_ids), MAX_LOGPROB_TOKEN_IDS, "ids"),
        ("sampling_params.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS, "entries"),
        ("constraint.choice", len(constraint.choice.choices), MAX_CHOICES, "choices"),
        ("constraint.structural_tags", len(constraint.structural_tags.tags), MAX_TAGS, "tags"),
        ("constraint.structural_tags", len(constraint.structural_tags.triggers), MAX_TAGS, "triggers"),
    ):
        if count > limit:
            yield FieldViolation(name, f"has {count} {noun}, at most {limit} can be served")


def refuse_oversized_embed(message: pb.EmbedRequest, info: ModelInfo, max_queued: int) -> None:
    """Raise InvalidRequest if there are more inputs, or longer ones, than one call can serve."""
    count = len(message.inputs)
    _refuse_many("inputs", count, max_queued)
    asked = message.dimensions if message.HasField("dimensions") else info.embedding_dimension
    # Dimensions outside the range are the engine's to refuse.
    dimension = min(max(asked, 1), max(info.embedding_dimension, 1))
    if count * dimension > MAX_EMBED_NUMBERS:
        fit = MAX_EMBED_NUMBERS // dimension
        raise InvalidRequest.of("inputs", f"at most {fit} vectors of {dimension} numbers fit one response")
    _refuse_many_ids(message.inputs, info, message.truncate)


def refuse_oversized_classify(message: pb.ClassifyRequest, info: ModelInfo, labels: Labels, max_queued: int) -> None:
    """As `refuse_oversized_embed`, for inputs that are judged by `labels`."""
    count = len(message.inputs)
    _refuse_many("inputs", count, max_queued)
    size = label_score_bytes(labels.names)
    if count * size > MAX_LABEL_BYTES:
        fit = MAX_LABEL_BYTES // size
        raise InvalidRequest.of("inputs", f"at most {fit} with {len(labels.names)} labels each fit one response")
    _refuse_many_ids(message.inputs, info, message.truncate)


def refuse_oversized_score(message: pb.ScoreRequest, info: ModelInfo, max_queued: int) -> None:
    """Raise InvalidRequest for more documents, or a longer query or longer documents, than one call can serve."""
    count = len(message.documents)
    _refuse_many("documents", count, max_queued)
    longest = info.max_input_length * MAX_QUERY_CHARS_PER_TOKEN
    if len(message.query) > longest:
        raise InvalidRequest.of("query", f"must have at most {longest} characters")
    chars = count * len(message.query) + sum(map(len, message.documents))
    if chars > MAX_SCORE_CHARS:
        told = f"with the query in front of each have {chars} characters, at most {MAX_SCORE_CHARS} fit one call"
        raise InvalidRequest.of("documents", told)


def _refuse_many(field: str, count: int, max_queued: int) -> None:
    limit = min(MAX_EMBED_INPUTS, max_queued)
    if count > limit:
        raise InvalidRequest.of(field, f"has {count} {field}, at most {limit} can be served in one call")


def _refuse_many_ids(inputs: Sequence[pb.EmbedInput | pb.ClassifyInput], info: ModelInfo, truncate: bool) -> None:
    lengths = [len(each.token_ids.ids) if each.WhichOneof("input") == "token_ids" else 0 for each in inputs]
    violations = [
        FieldViolation(
            f"inputs[{index}].token_ids.ids", f"has {ids} tokens, at most {info.max_input_length} can be served"
        )
        for index, ids in enumerate(lengths)
        if ids > info.max_input_length and not truncate
    ]
    most = max(MAX_EMBED_IDS, info.max_input_length)
    if not violations and sum(lengths) > most:
        violations.append(FieldViolation("inputs", f"have {sum(lengths)} token ids, at most {most} fit one call"))
    if violations:
        raise InvalidRequest(violations)


def detokenize_ids(message: pb.DetokenizeRequest, info: ModelInfo) -> tuple[int, ...]:
    """The ids to turn into text. Raises InvalidRequest if there are too many."""
    limit = max(MAX_DETOKENIZE_IDS, info.context_length)
    count = len(message.token_ids)
    if count > limit:
        raise InvalidRequest.of("token_ids", f"has {count} ids, at most {limit} can be served")
    return tuple(message.token_ids)
