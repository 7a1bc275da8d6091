"""The contract between `service` and the engine: plain data and awaitables, nothing that assumes one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

from core.engine.streams.unread import UnreadRoom
from core.lanes import LaneRecorder
from core.types.adapters import AdapterList, AdapterLoad
from core.types.control import Activity, Nap, WeightSource, WeightUpdate
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
    """An `OutputStream` that can also be read without waiting, for a front end with many streams on one connection.

    `watch(ready)` calls `ready` now and on every change. Each `poll` then returns the next event that is there, deltas
    merged as in any `OutputStream`, or None when there is none left; it raises the stream's error once. `ended` says
    that there will be no more. `open_outputs` counts the outputs that have not got their terminal, whether it was read
    or not.
    """

    @property
    def open_outputs(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    def poll(self) -> OutputEvent | None: ...

    def watch(self, ready: Callable[[], None]) -> None: ...


class CountedStream(PolledStream, Protocol):
    """A `PolledStream` of the engine itself. Its unread bytes count, at first in the engine's room for all streams.

    `count_unread(room)` moves them to another room. A room that is short of bytes calls `give_way`: the stream ends
    with SlowConsumer, and what was unread is forgotten.
    """

    def count_unread(self, room: UnreadRoom) -> None: ...

    def give_way(self) -> None: ...


class EmbedCall(Protocol):
    """An admitted embedding request: one vector per input, all of them or an error.

    `aclose()` aborts what still runs; it is idempotent and must be called on every path.
    """

    request_id: str

    async def result(self) -> EmbedResult:
        """Wait for every vector; call it once.

        Raises what an `OutputStream` raises, and RequestAborted when `Engine.abort` ended the request.
        """
        ...

    async def aclose(self) -> None: ...


class PrefixWatch(Protocol):
    """The pages that the prefix cache holds for one namespace, and then every change.

    `close()` is idempotent and must be called on every path.
    """

    page_size: int
    """Tokens per page."""
    contents: Sequence[PrefixStored]
    """What was cached when the watch began, parents before children."""

    async def changes(self) -> Sequence[PrefixChange]:
        """Changes since the last call, in order; waits for at least one.

        Raises SlowConsumer, now and on every later call, when more was left unread than is kept: watch again from the
        start.
        """
        ...

    def close(self) -> None: ...


class Prefixes(Protocol):
    """The prefix cache as a front end sees it. Event-loop thread only."""

    def watch(self, cache_salt: str) -> PrefixWatch | Awaitable[PrefixWatch]:
        """Follow what requests with `cache_salt` and no adapter would find.

        Raises Unsupported when the engine has no prefix cache.
        """
        ...

    def flush(self, tenant: str | None = None) -> int | Awaitable[int]:
        """Give up every cached page that no request holds; returns how many. Raises Draining or EngineDead.

        With a `tenant`, only pages under salts that begin with this name and a NUL, whatever their adapter.
        """
        ...


class OpenStreams(Protocol):
    """The streams that have not ended. Event-loop thread only."""

    def __len__(self) -> int: ...

    def oldest(self, count: int) -> Sequence[StreamInfo]:
        """At most `count` streams, oldest first."""
        ...

    def on_end(self, told: Callable[[StreamInfo], None]) -> None:
        """Call `told` with each stream when its last sequence has ended. There is one listener; it must be quick."""
        ...


class Control(Protocol):
    """Holds the engine still, and changes its weights or gives memory back meanwhile. Event-loop thread only.

    Every method raises EngineDead, or Draining, unless the engine is READY. Requests that wait keep their deadlines and
    queue timeouts.
    """

    def follow(self, told: Callable[[Activity], None]) -> None:
        """Call `told` with what the engine does, now and at every change. There is one listener; it must be quick."""
        ...

    def fetch_by(self, fetch: Callable[[str], Path]) -> None:
        """Find weights by name with `fetch`, which blocks and raises ModelLoadError; without it none are found so."""
        ...

    async def pause(self, *, ends: bool = False) -> int:
        """Plan no step from now on; returns how many streams there are, once no step is in flight. Idempotent.

        Streams wait, and so do new requests. With `ends`, streams end with Paused and new requests are refused with it.
        """
        ...

    async def resume(self) -> None:
        """Plan steps again, and take requests again. Idempotent. Raises Asleep where the engine must be woken."""
        ...

    async def update_weights(self, source: WeightSource, version: str) -> WeightUpdate:
        """Serve the weights in `source` as `version`, from one step to the next, and forget every cached prefix.

        They are loaded and proved beside serving; then requests that run are computed again from their tokens. An
        update that fails changes nothing. A caller that leaves does not end it. Raises InvalidRequest, which names
        `path`, `name` or `weight_version` and what does not fit; Unsupported; Overloaded (CONTROL_BUSY, WEIGHT_MEMORY);
        RequestFailed where the device could not take them, and the old ones serve on.
        """
        ...

    async def sleep(self) -> Nap:
        """Give the memory of the pools back, on an accelerator that of the weights too. Idempotent.

        Streams and new requests wait until `wake`. Raises Overloaded (CONTROL_BUSY).
        """
        ...

    async def wake(self) -> None:
        """Take the memory again and go on, unless paused. Idempotent.

        Raises Overloaded (CONTROL_BUSY; WEIGHT_MEMORY where there is too little: it sleeps on).
        """
        ...


class Engine(Protocol):
    """What a front end may ask. Everything belongs to the event-loop thread, except what says otherwise."""

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
        """Records what the engine's lanes do; usable from any thread. None where another process runs the steps."""
        ...

    @property
    def open_streams(self) -> OpenStreams | None:
        """The streams that have not ended, to list and count them. None where another process knows them."""
        ...

    @property
    def model_info(self) -> ModelInfo:
        """Facts of the served model."""
        ...

    @property
    def live_requests(self) -> int:
        """Streams opened and not yet ended."""
        ...

    def full(self, tenant: str) -> bool:
        """Whether the waiting queue has no room for even one sequence of `tenant`, as far as this process knows."""
        ...

    @property
    def prefixes(self) -> Prefixes:
        """The prefix cache."""
        ...

    @property
    def control(self) -> Control:
        """Pauses it, changes its weights, has it sleep."""
        ...

    async def generate(self, request: GenerateRequest) -> OutputStream:
        """Validate, tokenise and queue the request; returns its stream once it is in the waiting queue.

        Raises InvalidRequest, AdapterNotFound, DuplicateRequest, Overloaded, DeadlinePassed, RequestAborted,
        RequestFailed, Draining or EngineDead before anything reaches a batch.
        """
        ...

    async def embed(self, request: EmbedRequest) -> EmbedCall:
        """Like `generate`, for vectors: returns once every input is in the waiting queue, and raises the same."""
        ...

    def abort(self, request_id: str) -> bool | Awaitable[bool]:
        """End the request as CANCELLED if it is live; returns whether it was. Idempotent.

        An engine in another process answers later, by an awaitable. So do `unload_adapter` and `list_adapters`.
        """
        ...

    async def tokenize(self, text: str, add_special_tokens: bool = True, caller: str = "") -> list[int]:
        """Token ids of `text`, made off the loop; callers take turns in rotation.

        Raises InvalidRequest when it cannot be encoded or is too long, RequestFailed when the tokenizer fails, and
        Draining.
        """
        ...

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True, caller: str = "") -> str:
        """Text of `ids`, made as in `tokenize`.

        Raises InvalidRequest for ids outside the vocabulary, RequestFailed when the tokenizer fails, and Draining.
        """
        ...

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterLoad:
        """Read the LoRA adapter in the directory `path`, below the configured one, and serve it as `name`.

        An empty `path` means `name`. Where there is no room, the least recently used adapters that are neither pinned
        nor in use are evicted. A load that fails changes nothing. Raises InvalidRequest, which names `name` or `path`
        and what does not fit the model; AdapterExists; AdaptersOff; Overloaded (reasons ADAPTER_MEMORY, ADAPTER_LOADS);
        Draining; EngineDead.
        """
        ...

    def unload_adapter(self, name: str) -> int | Awaitable[int]:
        """Refuse new requests for the adapter; returns how many still use it. It is freed with the last of them.

        Raises AdapterNotFound.
        """
        ...

    def list_adapters(self) -> AdapterList | Awaitable[AdapterList]:
        """Every adapter that holds memory, the bytes that they hold, and how many they may."""
        ...

    async def drain(self, timeout: float) -> int:
        """Refuse new requests, give live ones `timeout` seconds, end those left with Draining; returns their number."""
        ...

    async def stop(self) -> None:
        """Stop the forward thread and end every stream. Idempotent."""
        ...

    async def wait_dead(self) -> BaseException:
        """Return the cause once the engine is DEAD; never returns otherwise."""
        ...
