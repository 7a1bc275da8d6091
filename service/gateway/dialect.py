"""The records between the shared behaviour and a dialect's codec, in the engine's terms and in no dialect's.

A dialect is a codec and nothing else: it reads requests into these records and writes these records into messages. The
behaviour between the two is the same for all dialects (`service.gateway.servicer`). A new dialect is a new file and one
line in `service.gateway.registration`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from core.types.handover import Handed
from core.types.io import EmbedRequest, EmbedResult, GenerateRequest, ModelInfo, TokenLogprob, Usage
from core.types.stats import DraftStats


@dataclass(frozen=True, slots=True)
class Asked:
    """One Generate call. Without `stream` all outputs are sent whole, once, when the last has ended."""

    request: GenerateRequest
    stream: bool
    prompt_from: int = 0
    """The place in the prompt from which its log probabilities are told, where they are wanted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one output; `logprobs` has one entry per token, or none at all."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    prompt_tokens: int
    completion_tokens: int
    """Tokens of this output so far, these included."""
    chosen_ids: Sequence[int] = ()
    """The ids that `chosen` of each of `logprobs` is of."""
    prompt: Any = None
    """With the first piece of an output: what is told of the prompt, as `Dialect.prompt` made it."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A finished output: all its tokens, the reason of its end, and its token counts."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    reason: str
    """`stop`, `length` or `abort`: passed to the gateway's clients as it is."""
    usage: Usage
    matched_stop: str | int | None
    chosen_ids: Sequence[int] = ()
    prompt: Any = None
    handed: Handed | None = None
    """Where the keys of the prompt are, for the worker that decodes."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the served model that gateways ask for. `path` is the directory where they look for a tokenizer."""

    info: ModelInfo
    path: str
    model_type: str
    pad_token_id: int
    default_sampling: str
    """JSON object of the checkpoint's own sampling defaults; empty if it has none."""
    weight_version: str
    """Name of the weights that are served."""


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's load as of its last step; token counts are of the KV pool."""

    running: int
    waiting: int
    used_tokens: int
    max_total_tokens: int
    token_usage: float
    gen_throughput: float
    """Tokens per second, over the last seconds."""
    cache_hit_rate: float
    """Share of all prompt tokens so far that came from the prefix cache."""
    max_running: int
    drafts: DraftStats | None = None
    """Of all drafts so far; None without speculation, and in the load of one tenant."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts of the server process; `uptime` is in seconds."""

    version: str
    active_requests: int
    paused: bool
    started_at: datetime
    uptime: float
    page_size: int
    max_running: int
    max_total_tokens: int
    dtype: str
    kv_dtype: str
    """As `--kv-cache-dtype` says it."""
    role: str
    """`both`, `prefill` or `decode`, and what such a worker is paired by."""
    engine_id: str
    transfer_port: int


class Dialect(Protocol):
    """One gateway service: its descriptor, and the translation of messages to records and back.

    Reading raises InvalidRequest with the dialect's own names of fields. Fields in an InvalidRequest of the engine are
    renamed by `fields`. `deadline` is a `time.monotonic()` instant. Ids and salts are those that the client gave;
    `OpenCalls` puts the tenant in front.
    """

    name: str
    service: Any
    """The protobuf descriptor of the service: its full name and its methods."""
    fields: Mapping[str, str]
    """The engine's name of a field -> the dialect's."""

    def generate_request(self, message: Any, info: ModelInfo, deadline: float | None) -> Asked: ...

    def embed_request(self, message: Any, info: ModelInfo, deadline: float | None) -> EmbedRequest: ...

    def prompt(self, first: int | None) -> Any:
        """What is told of a prompt, as a message that grows; `first` is its first token, None if that is left out."""
        ...

    def add_to_prompt(self, told: Any, entries: Sequence[TokenLogprob]) -> None: ...

    def chunk(self, request_id: str, piece: Piece) -> Any: ...

    def complete(self, request_id: str, whole: Whole) -> Any: ...

    def embed_response(self, result: EmbedResult) -> Any: ...

    def abort_ids(self, message: Any) -> Sequence[str]: ...

    def abort_response(self, found: bool) -> Any: ...

    def health(self, healthy: bool, message: str) -> Any: ...

    def model_info(self, facts: ModelFacts) -> Any: ...

    def server_info(self, facts: ServerFacts) -> Any: ...

    def loads(self, version: str, timestamp: str, load: Load) -> Any: ...
