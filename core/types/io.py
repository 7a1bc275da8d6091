"""Requests to the engine and events from it: plain data, so that they could cross a process boundary one day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from core.types.audio import Audio
from core.types.chat import AnswerPart, ChatMessage, ToolMode
from core.types.constraint import Constraint
from core.types.handover import Handed, HandOver, TakeOver
from core.types.labels import Labels
from core.types.sampling_params import SamplingParams


class FinishReason(Enum):
    """Why an output ended. Errors are not finish reasons: they are exceptions from the stream."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SentImage:
    """An encoded image, and the field that it came in."""

    field: str
    data: bytes


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request for one or more outputs. Exactly one of `text`, `token_ids`, `chat`, `audio` is given.

    `deadline`: a `time.monotonic()` instant or None. `queue_timeout`: seconds. `tenant`: tenants share the machine by
    their `weight`, which is above 0. `priority`: within a tenant lower values are served first, as in vLLM.
    `cache_salt`: requests with different salts never share cached prefixes; the part before its first NUL names the
    tenant whose share of the cache the pages count for. `adapter`: name of a loaded LoRA adapter; empty for the base
    model alone. `want_text=False` skips detokenisation. `speculative=False`: no draft of its tokens is verified, and
    its text drafts for no other request.
    """

    request_id: str = ""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[ChatMessage, ...] | None = None
    audio: Audio | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    want_text: bool = True
    priority: int = 0
    queue_timeout: float | None = None
    deadline: float | None = None
    cache_salt: str = ""
    adapter: str = ""
    constraint: Constraint | None = None
    trace_id: str = ""
    """32 hexadecimal digits if the request belongs to a sampled trace: latency histograms name it as an exemplar."""
    tenant: str = ""
    weight: float = 1.0
    speculative: bool = True
    special_tokens: bool = False
    """Whether special tokens that are written out in `chat` count as such; else they are text like any other."""
    chat_tools: tuple[str, ...] = ()
    """What the chat template gets as tools: texts of JSON objects."""
    chat_arguments: str = ""
    """Further names for the chat template, as the text of a JSON object; empty for none."""
    tool_mode: ToolMode = ToolMode.AUTO
    tool_name: str = ""
    """With `ToolMode.REQUIRED`: of the one tool that is called, once; empty for any of them, as often as it likes."""
    images: tuple[bytes, ...] = ()
    """Encoded images of `text` or `token_ids`, in the order of their places; those of `chat` are in its messages."""
    hand_over: HandOver | None = None
    """Its prompt is computed here, and decoded by another engine."""
    take_over: TakeOver | None = None
    """Its prompt was computed by another engine, and is decoded here."""
    parse_answer: bool = False
    """Whether the answer to `chat` is read: deltas then have `parts` in place of `text`."""

    @property
    def sent_images(self) -> tuple[SentImage, ...]:
        """All images, in order."""
        if self.chat is None:
            return tuple(SentImage(f"images[{place}]", data) for place, data in enumerate(self.images))
        return tuple(
            SentImage(f"chat.messages[{turn}].parts[{place}]", part)
            for turn, message in enumerate(self.chat)
            for place, part in enumerate(message.parts)
            if isinstance(part, bytes)
        )

    @property
    def has_media(self) -> bool:
        """Whether it has images or a sound, which take time to read."""
        return self.audio is not None or bool(self.sent_images)

    @property
    def offered_tools(self) -> tuple[str, ...]:
        """The tools that the model may call."""
        return () if self.tool_mode is ToolMode.NONE else self.chat_tools


class Pooling(Enum):
    """How the hidden states of all tokens become one vector: their mean, that of the last token, or of the first.

    With `LABELS` the vector is what the checkpoint's classification head makes of them: one number per label.
    """

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"
    LABELS = "labels"


EMBEDDINGS: Final = (Pooling.MEAN, Pooling.LAST, Pooling.CLS)
"""Those that make an embedding."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that are judged together: a query and a document, say."""

    first: str
    second: str


Input = str | tuple[int, ...] | TextPair
"""A text, its token ids, or a pair of texts."""


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Inputs to embed. Each is a sequence of its own; pairs are for `Pooling.LABELS`.

    Fields shared with `GenerateRequest` mean the same. `dimensions` keeps the first entries of each vector
    (Matryoshka), before it is normalised. Labels are neither cut nor normalised.
    """

    inputs: tuple[Input, ...]
    request_id: str = ""
    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    dimensions: int | None = None
    truncate: bool = False
    """Whether an input that is too long loses its end, of a pair that of the second text, instead of being refused."""
    priority: int = 0
    queue_timeout: float | None = None
    deadline: float | None = None
    cache_salt: str = ""
    adapter: str = ""
    tenant: str = ""
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The vector of one input, float32[D], and how many of its tokens came from the prefix cache."""

    values: npt.NDArray[np.float32]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """One vector per input, in the order of the inputs."""

    request_id: str
    embeddings: tuple[Embedding, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one output token, and the `top` alternatives (id, logprob), best first.

    `chosen` are those of the ids that the request names, in their order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    chosen: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one output. `cached_tokens` is the part of the prompt that came from the prefix cache.

    `draft_tokens`: drafts that steps verified for it. `accepted_draft_tokens`: how many of its `completion_tokens` were
    drafts.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations in seconds, all monotonic: arrival to first forward, arrival to first token, arrival to the end."""

    queue: float
    first_token: float
    total: float


@dataclass(frozen=True, slots=True)
class Started:
    """First event of every stream: its first token is being computed, or it ended well before any was.

    A stream that fails earlier has no event.

    `incarnation` tells a stream that is kept for `Attach` from others of its id; "" for a stream that is not kept.
    `weight_version`: of the weights that serve now. Outputs whose `Finished` names it too are of these alone.
    """

    request_id: str
    prompt_tokens: int
    incarnation: str = ""
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The newest part of output `index`. `position`: the place in that output of the first of `token_ids`.

    Where log probabilities of the prompt are wanted, its tokens come first, at places below 0: -1 is the last. No delta
    has tokens of both.

    Text can lag behind ids, while a stop string or a UTF-8 character is still incomplete. `parts`: of an answer that is
    read; there is no text then.
    """

    index: int
    position: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    parts: tuple[AnswerPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of output `index`; exactly one per index. `matched_stop` is the stop string or stop token id.

    `weight_version`: of the weights that its last token is of. `handed`: where the keys of its prompt are, if another
    engine is to decode it.
    """

    index: int
    reason: FinishReason
    usage: Usage
    timing: Timing
    matched_stop: str | int | None = None
    weight_version: str = ""
    handed: Handed | None = None


OutputEvent = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the served model for clients."""

    name: str
    architecture: str
    dtype: str
    vocab_size: int
    context_length: int
    max_input_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    has_chat_template: bool
    quantization: str = ""
    """Method and format of quantised weights; empty for plain ones."""
    embedding_dimension: int = 0
    """Length of the vectors that `embed` returns; 0 if the model has no hidden states to embed with."""
    pooling: Pooling = Pooling.LAST
    """How vectors are made for a client that does not say: as the checkpoint was trained, if it says that."""
    labels: Labels | None = None
    """What `Pooling.LABELS` gives a number for; None if the model judges nothing."""
    generates: bool = True
    """Whether the model puts out text: one with a classification head, or an encoder alone, does not."""
    answer_form: str = ""
    """How the model writes thoughts and calls, by the name of the form; empty if that is not known."""
    takes_images: bool = False
    takes_audio: bool = False
    grammar_backend: str = ""
    """Library that constraints are compiled with; empty if there is none."""
    role: str = "both"
    """`prefill` or `decode` where other servers do the rest of a request."""
    engine_id: str = ""
    """Drawn at the start of an engine with a role; empty without one."""
    transfer_port: int = 0
    """Where engines that decode fetch keys; 0 where they do not."""
    path: str = ""
    """Directory of the checkpoint on the server's disk."""
