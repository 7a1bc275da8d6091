"""The engine's side of one front end: runs its calls, sends the events of a step in one write, ends its requests."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, cast

from core import buggify
from core.engine.api import EmbedCall, Engine, OutputStream, PolledStream
from core.errors import RequestFailed, SlipstreamError
from core.types.control import WeightSource
from core.types.io import Delta, EmbedRequest, Finished, GenerateRequest, OutputEvent
from core.types.plain import to_plain
from service.calls.desk import ResumedStream, TenantDesk
from service.engine.handle import EngineHandle, answered
from service.frontends.events import EventBatch
from service.frontends.plain_json import UNREADABLE, error_to_plain, from_plain, vectors_to_plain
from service.frontends.prefix_watches import PrefixWatches
from service.frontends.wire import Kind, Link, WireError, pack_json
from service.limits.hold import Hold
from service.limits.work import Work
from service.metrics.rpc import RpcMetrics
from service.wire.position import Position

log = logging.getLogger(__name__)

FRAME_BYTES = 1024 * 1024
"""Bytes after which an EVENTS frame is sent and the next one begun. One step can have a hundred times as much for a
front end: streams with log probabilities that waited for a slow reader."""


class FrontEndHost:
    """What the engine process keeps for one front end: its streams by call number, and the calls at work.

    Tokens wait in the engine while the connection is full; there they are merged, and bounded per stream. `on_lost` is
    called when the front end is gone. Event-loop thread only.
    """

    def __init__(
        self, handle: EngineHandle, desk: TenantDesk, metrics: RpcMetrics, on_lost: Callable[[], None]
    ) -> None:
        self.link = Link(self._frame, self._lost, self._flush)
        self.listening = asyncio.Event()
        self.serving = asyncio.Event()
        self.lost = False
        self._handle, self._desk, self._metrics, self._on_lost = handle, desk, metrics, on_lost
        self._streams: dict[int, PolledStream] = {}
        self._embeds: dict[int, EmbedCall] = {}
        self._holds: dict[int, Hold] = {}
        self._prefixes = PrefixWatches()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, None] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._flushing = False

    def send(self, kind: Kind, value: Any, number: int = 0) -> None:
        """Send one JSON frame, after all events that are there for the front end now."""
        self._send(pack_json(kind, value, number))

    def _send(self, frame: bytes) -> None:
        self._flush()
        self.link.send(frame)

    def _frame(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.CALL:
            self._calls[number] = asyncio.create_task(self._answer(number, body))
        elif kind is Kind.END:
            self._end(number, _used(body))
        elif kind is Kind.COUNTS:
            self._count(body)
        elif kind in (Kind.LISTENING, Kind.SERVING):
            (self.listening if kind is Kind.LISTENING else self.serving).set()
        elif kind is not Kind.BEAT:
            raise WireError(f"{kind.name} from a front end")

    def _count(self, body: bytes) -> None:
        try:
            for counter, labels, amount in json.loads(body):
                self._metrics.add(counter, tuple(labels), amount)
        except Exception:
            # Counts are metrics only: no stream depends on them, so the connection stays.
            log.exception("what a front end counted cannot be read")

    async def _answer(self, number: int, body: bytes) -> None:
        """Run one call and send its reply."""
        try:
            method, value = self._read_call(body)
            reply = pack_json(Kind.REPLY, {"ok": await method(self, number, value)}, number)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of native code too: the front end would wait for its reply
            if not isinstance(error, SlipstreamError):
                log.exception("a call of a front end failed")
            self._release(number)
            reply = pack_json(Kind.REPLY, error_to_plain(error), number)
        finally:
            self._calls.pop(number, None)
        self._send(reply)
        await buggify.pause("replied")
        # Watched only after the reply: the front end learns from the reply that the stream is open, and how many
        # outputs it has.
        if number in self._streams:
            self._streams[number].watch(lambda: self._mark(number))

    async def _generate(self, number: int, value: dict[str, Any]) -> str:
        stream = await self._engine.generate(from_plain(GenerateRequest, value["request"]))
        self._streams[number] = cast(PolledStream, stream)
        return stream.request_id

    async def _enter(self, number: int, value: dict[str, Any]) -> float:
        work = from_plain(Work, value["work"])
        hold = self._holds[number] = await self._desk.enter(value["tenant"], value["deadline"], work)
        return hold.weight

    async def _open(self, number: int, value: dict[str, Any]) -> Any:
        asked, hold = from_plain(GenerateRequest, value["request"]), self._holds.get(value["hold"]) or Hold()
        return self._resumed(number, await self._desk.open(asked, value["tenant"], hold))

    async def _attach(self, number: int, value: dict[str, Any]) -> Any:
        places = {int(index): Position(**place) for index, place in value["positions"].items()}
        return self._resumed(number, await self._desk.attach(value["request_id"], places, value["incarnation"]))

    def _resumed(self, number: int, stream: ResumedStream) -> Any:
        self._streams[number] = cast(PolledStream, stream)
        said = {"outputs": stream.expected, "want_text": stream.want_text}
        if not stream.expected:
            # With the reply: the front end waits for the last end of a stream, and no end comes after this start.
            said["started"] = to_plain(self._streams[number].poll())
        return said

    async def _embed(self, number: int, value: dict[str, Any]) -> str:
        call = await self._engine.embed(from_plain(EmbedRequest, value["request"]))
        self._embeds[number] = call
        return call.request_id

    async def _vectors(self, _number: int, value: dict[str, Any]) -> Any:
        return vectors_to_plain(await self._embeds[value["of"]].result())

    async def _abort(self, _number: int, value: dict[str, Any]) -> bool:
        return await answered(self._engine.abort(value["request_id"]))

    async def _tokenize(self, _number: int, value: dict[str, Any]) -> list[int]:
        return await self._engine.tokenize(value["text"], value["special"], value["caller"])

    async def _detokenize(self, _number: int, value: dict[str, Any]) -> str:
        return await self._engine.detokenize(value["ids"], value["skip"], value["caller"])

    async def _load_adapter(self, _number: int, value: dict[str, Any]) -> Any:
        return to_plain(await self._engine.load_adapter(value["name"], value["path"], pinned=value["pinned"]))

    async def _unload_adapter(self, _number: int, value: dict[str, Any]) -> int:
        return await answered(self._engine.unload_adapter(value["name"]))

    async def _pause(self, _number: int, value: dict[str, Any]) -> int:
        return await self._engine.control.pause(ends=value["ends"])

    async def _resume(self, _number: int, _value: dict[str, Any]) -> None:
        await self._engine.control.resume()

    async def _update_weights(self, _number: int, value: dict[str, Any]) -> Any:
        source = from_plain(WeightSource, value["source"])
        return to_plain(await self._engine.control.update_weights(source, value["version"]))

    async def _sleep(self, _number: int, _value: dict[str, Any]) -> Any:
        return to_plain(await self._engine.control.sleep())

    async def _wake(self, _number: int, _value: dict[str, Any]) -> None:
        await self._engine.control.wake()

    async def _list_adapters(self, _number: int, _value: dict[str, Any]) -> Any:
        return to_plain(await answered(self._engine.list_adapters()))

    async def _tenant_load(self, _number: int, value: dict[str, Any]) -> Any:
        return to_plain(await self._desk.load(value["tenant"]))

    async def _flush_prefixes(self, _number: int, value: dict[str, Any]) -> int:
        return await answered(self._engine.prefixes.flush(value["tenant"]))

    async def _watch_prefixes(self, number: int, value: dict[str, Any]) -> Any:
        return self._prefixes.open(number, await answered(self._engine.prefixes.watch(value["cache_salt"])))

    async def _prefix_contents(self, _number: int, value: dict[str, Any]) -> Any:
        return self._prefixes.contents(value["of"], value["start"])

    async def _prefix_changes(self, _number: int, value: dict[str, Any]) -> Any:
        return await self._prefixes.changes(value["of"])

    @property
    def methods(self) -> Mapping[str, Method]:
        """What may be called over the connection, by name."""
        return METHODS

    @property
    def _engine(self) -> Engine:
        return self._handle.require()

    def _read_call(self, body: bytes) -> tuple[Method, dict[str, Any]]:
        """The method that the call names, and its arguments. Raises RequestFailed if the body cannot be read."""
        try:
            value: dict[str, Any] = json.loads(body)
            return self.methods[value["method"]], value
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RequestFailed(UNREADABLE) from None

    def _mark(self, number: int) -> None:
        """Stream `number` has an event. Streams are read together, in a callback after the step was handed out."""
        self._ready[number] = None
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._ready:
            return
        batch = EventBatch()
        ready, self._ready = deque(self._ready), {}
        while ready and not self.link.full:
            number = ready.popleft()
            if number in self._streams:
                self._read(number, batch)
            if batch.size > FRAME_BYTES:
                self.link.send(batch.frame())
                batch = EventBatch()
        # Streams that were not reached keep their place before those that became ready meanwhile.
        self._ready = dict.fromkeys(ready) | self._ready
        if batch:
            self.link.send(batch.frame())

    def _read(self, number: int, batch: EventBatch) -> None:
        stream = self._streams[number]
        try:
            while (event := stream.poll()) is not None:
                _add(batch, number, event)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if not isinstance(error, SlipstreamError):
                log.exception("a stream of a front end failed")
            batch.end(number, "error", error_to_plain(error))
            self._release(number)
        if stream.ended:
            self._streams.pop(number, None)

    def _end(self, number: int, used: int = 0) -> None:
        """End call `number` for the front end: abort its request, or give back a tenant's place with `used` tokens."""
        # Removed here and not by the task: a task that is cancelled before its first step never runs its `finally`.
        call = self._calls.pop(number, None)
        if call is not None:
            call.cancel()
        self._release(number, used)

    def _release(self, number: int, used: int = 0) -> None:
        """Close everything that the engine holds for call `number`; a tenant's place is charged `used` tokens."""
        if number in self._streams:
            self._close(self._streams.pop(number))
        if number in self._embeds:
            self._close(self._embeds.pop(number))
        if number in self._holds:
            hold = self._holds.pop(number)
            hold.use(used)
            hold.release()
        self._prefixes.close(number)

    def _close(self, held: OutputStream | EmbedCall) -> None:
        task = asyncio.create_task(held.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _lost(self) -> None:
        """The front end is gone: its requests are ended, those of other front ends go on."""
        for number in [*self._calls, *self._streams, *self._embeds, *self._holds, *self._prefixes]:
            self._end(number)
        self._ready.clear()
        self.lost = True
        # `FrontEndGroup._all` waits for these, and must not wait for a front end that is gone.
        self.listening.set()
        self.serving.set()
        self._on_lost()


def _add(batch: EventBatch, number: int, event: OutputEvent) -> None:
    """Add an event to its group in the batch: starts, deltas or ends. The front end reads the groups in this order.

    The order of one stream is kept: its start comes before its deltas, and its ends come after them.
    """
    if type(event) is Delta:
        batch.add(number, event)
    elif isinstance(event, Finished):
        batch.end(number, "finished", to_plain(event))
    else:
        batch.start(number, to_plain(event))


def _used(body: bytes) -> int:
    """Tokens with which a tenant's place is given back. 0 if unreadable: the place must be given back all the same."""
    try:
        return int(json.loads(body)["used"]) if body else 0
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        log.error("what a front end says of the end of a call cannot be read")
        return 0


Method = Callable[[Any, int, dict[str, Any]], Awaitable[Any]]
METHODS: Final[Mapping[str, Method]] = {
    "generate": FrontEndHost._generate,
    "enter": FrontEndHost._enter,
    "open": FrontEndHost._open,
    "attach": FrontEndHost._attach,
    "embed": FrontEndHost._embed,
    "vectors": FrontEndHost._vectors,
    "abort": FrontEndHost._abort,
    "tokenize": FrontEndHost._tokenize,
    "detokenize": FrontEndHost._detokenize,
    "load_adapter": FrontEndHost._load_adapter,
    "unload_adapter": FrontEndHost._unload_adapter,
    "list_adapters": FrontEndHost._list_adapters,
    "pause": FrontEndHost._pause,
    "resume": FrontEndHost._resume,
    "update_weights": FrontEndHost._update_weights,
    "sleep": FrontEndHost._sleep,
    "wake": FrontEndHost._wake,
    "tenant_load": FrontEndHost._tenant_load,
    "flush_prefixes": FrontEndHost._flush_prefixes,
    "watch_prefixes": FrontEndHost._watch_prefixes,
    "prefix_contents": FrontEndHost._prefix_contents,
    "prefix_changes": FrontEndHost._prefix_changes,
}
