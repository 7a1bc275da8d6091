"""The contract between `service` and the engine: plain data and awaitables, nothing that assumes one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import Enum
from typing import Protocol

from core.engine.streams.unread import UnreadRoom
from core.lanes import LaneRecorder
from core.types.adapters import AdapterList, AdapterLoad
from core.types.io import EmbedRequest, EmbedResult, GenerateRequest, ModelInfo, OutputEvent
from core.types.prefixes import PrefixChange, PrefixStored
from core.types.stats import EngineStats
from core.types.streams import StreamInfo


class EngineState(Enum):
    """STARTING -> READY -> DRAINING -> STOPPED; DEAD can follow any of them and is final."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


class OutputStream(Protocol):
    """The events of one request: `Started`, then deltas, then one `Finished` per output index.

    Iteration ends after the last `Finished`, or raises a `core.errors.SlipstreamError` once. Pending deltas of an index
    are merged, so a reader that falls behind gets fewer, longer events. `aclose()` aborts what still runs; it is
    idempotent and must be called (or the stream exhausted) on every path.
    """

    request_id: str

    def __aiter__(self) -> AsyncIterator[OutputEvent]: ...

    async def __anext__(self) -> OutputEvent: ...

    async def aclose(self) -> None: ...


class PolledStream(OutputStream, Protocol):
    """An `OutputStream` that can also be read without waiting: what carries many streams over one connection needs it.

    `watch(ready)` has `ready` called, now and on every change; `poll` then gives the events that are there, merged as
    ever, and None after the last; `ended` says that there will be no more. `open_outputs` counts those without a
    terminal, read or not.
    """

    @property
    def open_outputs(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    def poll(self) -> OutputEvent | None: ...

    def watch(self, ready: Callable[[], None]) -> None: ...


class CountedStream(PolledStream, Protocol):
    """A `PolledStream` of the engine itself, whose unread bytes are counted: in the engine's room for all streams.

    `count_unread(room)` has them counted in another room from then on. A room in want of bytes calls `give_way`: the
    stream ends with SlowConsumer, and what was unread is forgotten.
    """

    def count_unread(self, room: UnreadRoom) -> None: ...

    def give_way(self) -> None: ...


class EmbedCall(Protocol):
    """An admitted embedding request: one vector per input, all of them or an error.

    `aclose()` aborts what still runs; it is idempotent and must be called on every path.
    """

    request_id: str

    async def result(self) -> EmbedResult:
        """Wait for every vector, once. Raises what a stream raises, and RequestAborted when it was ended by its id."""
        ...

    async def aclose(self) -> None: ...


class PrefixWatch(Protocol):
    """What the prefix cache holds of one namespace, and then what changes.

    `close()` is idempotent and must be called on every path.
    """

    page_size: int
    contents: Sequence[PrefixStored]
    """When the watch began, parents before children."""

    async def changes(self) -> Sequence[PrefixChange]:
        """What happened since the last call, in order, at least one; waits for it.

        Raises SlowConsumer, now and ever after, when more was left unread than is kept: watch again from the start.
        """
        ...

    def close(self) -> None: ...


class Prefixes(Protocol):
    """The prefix cache as a front end sees it. Event-loop thread only."""

    def watch(self, cache_salt: str) -> PrefixWatch | Awaitable[PrefixWatch]:
        """Follow what requests with this salt, and no adapter, would find. Raises Unsupported where nothing is kept."""
        ...

    def flush(self, tenant: str | None = None) -> int | Awaitable[int]:
        """Give up every cached page that no request holds; how many. Raises Draining or EngineDead.

        `tenant`: only those under salts that begin with it and a NUL, with whatever adapter.
        """
        ...


class OpenStreams(Protocol):
    """The streams that have not ended. Event-loop thread only."""

    def __len__(self) -> int: ...

    def oldest(self, count: int) -> Sequence[StreamInfo]:
        """At most `count` of them, oldest first."""
        ...

    def on_end(self, told: Callable[[StreamInfo], None]) -> None:
        """Have `told` called with each stream when its last sequence has ended; one listener, which must be quick."""
        ...


class Engine(Protocol):
    """What a front end may ask. All methods belong to the event-loop thread except `stats` and `state`."""

    @property
    def state(self) -> EngineState:
        """Lifecycle state; readable from any thread."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest immutable snapshot; readable from any thread."""
        ...

    @property
    def lanes(self) -> LaneRecorder | None:
        """Records what the engine's lanes do; from any thread. None where another process runs the steps."""
        ...

    @property
    def open_streams(self) -> OpenStreams | None:
        """For whoever looks on. None where another process knows them."""
        ...

    @property
    def model_info(self) -> ModelInfo:
        """Facts of the served model; valid once READY."""
        ...

    @property
    def live_requests(self) -> int:
        """Streams opened and not yet ended."""
        ...

    def full(self, tenant: str) -> bool:
        """Whether the queue has no room for even one sequence of `tenant`, as far as it is known here."""
        ...

    @property
    def prefixes(self) -> Prefixes:
        """The prefix cache; valid once READY."""
        ...

    async def generate(self, request: GenerateRequest) -> OutputStream:
        """Validate, tokenise, queue; return the stream once the request is admitted to the waiting queue.

        Raises InvalidRequest, AdapterNotFound, DuplicateRequest, Overloaded, DeadlinePassed, RequestAborted,
        RequestFailed, Draining or EngineDead before anything reaches a batch.
        """
        ...

    async def embed(self, request: EmbedRequest) -> EmbedCall:
        """Like `generate`, for vectors: returns once every input is in the waiting queue, and raises the same."""
        ...

    def abort(self, request_id: str) -> bool | Awaitable[bool]:
        """End the request as CANCELLED if it is live; whether it was. Idempotent.

        An engine in another process answers later; so do the two below.
        """
        ...

    async def tokenize(self, text: str, add_special_tokens: bool = True, caller: str = "") -> list[int]:
        """Ids of `text`, made off the loop, with callers in rotation.

        Raises InvalidRequest when it cannot be encoded or is too long.
        """
        ...

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True, caller: str = "") -> str:
        """Text of `ids`. Raises InvalidRequest for ids outside the vocabulary."""
        ...

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterLoad:
        """Read the LoRA adapter in the directory `path`, below the configured one, and serve it as `name`.

        An empty path is the name. What is least recently used, unpinned and unused goes when there is no room. A load
        that fails changes nothing: InvalidRequest names `path` and what does not fit the model, AdapterExists,
        AdaptersOff, Overloaded (reasons ADAPTER_MEMORY, ADAPTER_LOADS), Draining, EngineDead.
        """
        ...

    def unload_adapter(self, name: str) -> int | Awaitable[int]:
        """Refuse new requests for the adapter; how many still use it, with the last of which it goes.

        Raises AdapterNotFound.
        """
        ...

    def list_adapters(self) -> AdapterList | Awaitable[AdapterList]:
        """Every adapter that holds memory."""
        ...

    async def drain(self, timeout: float) -> int:
        """Refuse new requests, give live ones `timeout` seconds, end the rest with Draining; how many were cut."""
        ...

    async def stop(self) -> None:
        """Stop the forward thread and end every stream. Idempotent."""
        ...

    async def wait_dead(self) -> BaseException:
        """Return the cause once the engine is DEAD; never returns otherwise."""
        ...
