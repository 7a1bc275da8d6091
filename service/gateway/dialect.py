"""What the shared behaviour and a dialect's codec say to each other, in the engine's terms and in no dialect's.

A dialect is a codec and nothing else: it reads requests into these records and writes these records into messages. What
happens in between is the same for all (`service.gateway.servicer`). A new dialect is a new file and one line in
`service.gateway.registration`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from core.types.io import EmbedRequest, EmbedResult, GenerateRequest, ModelInfo, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Asked:
    """One Generate call. `stream` off: every output comes whole, once, at its end."""

    request: GenerateRequest
    stream: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one output; `logprobs` has one entry per token, or none at all."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    prompt_tokens: int
    completion_tokens: int
    """Of this output so far, these included."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A finished output: all its tokens, why it ended, what it cost."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    reason: str
    """`stop`, `length` or `abort`: passed to the gateway's clients as it is."""
    usage: Usage
    matched_stop: str | int | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The served model as gateways want to know it. `path` is where they look for a tokenizer."""

    info: ModelInfo
    path: str
    model_type: str
    pad_token_id: int
    default_sampling: str
    """JSON object of the checkpoint's own sampling defaults; empty if it has none."""


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


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server process; `uptime` in seconds."""

    version: str
    active_requests: int
    paused: bool
    started_at: datetime
    uptime: float
    page_size: int
    max_running: int
    max_total_tokens: int
    dtype: str


class Dialect(Protocol):
    """One gateway service: its descriptor, and messages to records and back.

    Reading raises InvalidRequest with the dialect's own names of fields; what the engine raises about `fields` is
    renamed by them. `deadline` is a `time.monotonic()` instant. Ids and salts are those that the client gave;
    `OpenCalls` makes them its tenant's.
    """

    name: str
    service: Any
    """The descriptor: the full name and the methods."""
    fields: Mapping[str, str]
    """The engine's name of a field -> the dialect's."""

    def generate_request(self, message: Any, info: ModelInfo, deadline: float | None) -> Asked: ...

    def embed_request(self, message: Any, info: ModelInfo, deadline: float | None) -> EmbedRequest: ...

    def chunk(self, request_id: str, piece: Piece) -> Any: ...

    def complete(self, request_id: str, whole: Whole) -> Any: ...

    def embed_response(self, result: EmbedResult) -> Any: ...

    def abort_ids(self, message: Any) -> Sequence[str]: ...

    def abort_response(self, found: bool) -> Any: ...

    def health(self, healthy: bool, message: str) -> Any: ...

    def model_info(self, facts: ModelFacts) -> Any: ...

    def server_info(self, facts: ServerFacts) -> Any: ...

    def loads(self, version: str, timestamp: str, load: Load) -> Any: ...
