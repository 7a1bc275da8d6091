"""The engine's side of one front end: runs its calls, sends what a step made for it in one write, ends its requests."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from core import buggify
from core.engine.door import EmbedCall, Engine, OutputStream, PolledStream
from core.errors import SlipstreamError
from core.types.io import Delta, EmbedRequest, Finished, GenerateRequest, OutputEvent
from service.engine_slot import EngineSlot, answered
from service.frontends.plain import error_to_plain, from_plain, to_plain, vectors_to_plain
from service.frontends.prefix_watches import PrefixWatches
from service.frontends.wire import EventBatch, Kind, Link, pack_json
from service.metrics.rpc import RpcMetrics
from service.resume.history import Position
from service.tenants.desk import ResumedStream, TenantDesk
from service.tenants.gates import Hold

log = logging.getLogger(__name__)


class FrontEndHost:
    """What the engine process keeps for one front end: its streams by their numbers, and the calls at work.

    Tokens wait in the engine while the connection is full; there they are merged, and bounded per stream.
    """

    def __init__(self, slot: EngineSlot, desk: TenantDesk, metrics: RpcMetrics, on_lost: Callable[[], None]) -> None:
        self.link = Link(self._frame, self._lost, self._flush)
        self.listening = asyncio.Event()
        self.serving = asyncio.Event()
        self.lost = False
        self._slot, self._desk, self._metrics, self._on_lost = slot, desk, metrics, on_lost
        self._streams: dict[int, PolledStream] = {}
        self._embeds: dict[int, EmbedCall] = {}
        self._holds: dict[int, Hold] = {}
        self._prefixes = PrefixWatches()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, None] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._flushing = False

    def send(self, kind: Kind, value: Any) -> None:
        """One JSON frame, behind everything that is there for the front end now."""
        self._flush()
        self.link.send(pack_json(kind, value))

    def _frame(self, kind: Kind, body: bytes) -> None:
        value: Any = json.loads(body)
        if kind is Kind.CALL:
            number = int(value["id"])
            self._calls[number] = asyncio.create_task(self._answer(number, value["method"], value))
        elif kind is Kind.END:
            self._end(int(value["id"]))
        elif kind is Kind.COUNTS:
            for counter, labels, amount in value:
                self._metrics.add(counter, tuple(labels), amount)
        else:
            {Kind.LISTENING: self.listening, Kind.SERVING: self.serving}[kind].set()

    async def _answer(self, number: int, method: str, value: dict[str, Any]) -> None:
        """Run one call and send its reply."""
        try:
            reply = {"id": number, "ok": await _METHODS[method](self, number, value)}
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of native code too: the front end would wait for its reply
            if not isinstance(error, SlipstreamError):
                log.exception("a call of a front end failed")
            reply = {"id": number, **error_to_plain(error)}
        finally:
            self._calls.pop(number, None)
        self.send(Kind.REPLY, reply)
        await buggify.pause("replied")
        # Only now: the front end knows a stream from its reply on.
        if number in self._streams:
            self._streams[number].watch(lambda: self._mark(number))

    async def _generate(self, number: int, value: dict[str, Any]) -> str:
        stream = await self._engine.generate(from_plain(GenerateRequest, value["request"]))
        self._streams[number] = cast(PolledStream, stream)
        return stream.request_id

    async def _enter(self, number: int, value: dict[str, Any]) -> None:
        self._holds[number] = await self._desk.enter(value["tenant"], value["deadline"])

    async def _open(self, number: int, value: dict[str, Any]) -> Any:
        asked, hold = from_plain(GenerateRequest, value["request"]), self._holds.get(value["hold"]) or Hold()
        return self._resumed(number, await self._desk.open(asked, value["tenant"], hold))

    async def _attach(self, number: int, value: dict[str, Any]) -> Any:
        places = {int(index): Position(**place) for index, place in value["positions"].items()}
        return self._resumed(number, await self._desk.attach(value["request_id"], places))

    def _resumed(self, number: int, stream: ResumedStream) -> Any:
        self._streams[number] = cast(PolledStream, stream)
        return {"outputs": stream.expected, "want_text": stream.want_text}

    async def _embed(self, number: int, value: dict[str, Any]) -> str:
        call = await self._engine.embed(from_plain(EmbedRequest, value["request"]))
        self._embeds[number] = call
        return call.request_id

    async def _vectors(self, _number: int, value: dict[str, Any]) -> Any:
        return vectors_to_plain(await self._embeds[value["of"]].result())

    async def _abort(self, _number: int, value: dict[str, Any]) -> bool:
        return await answered(self._engine.abort(value["request_id"]))

    async def _tokenize(self, _number: int, value: dict[str, Any]) -> list[int]:
        return await self._engine.tokenize(value["text"], value["special"])

    async def _detokenize(self, _number: int, value: dict[str, Any]) -> str:
        return await self._engine.detokenize(value["ids"], value["skip"])

    async def _load_adapter(self, _number: int, value: dict[str, Any]) -> Any:
        return to_plain(await self._engine.load_adapter(value["name"], value["path"], pinned=value["pinned"]))

    async def _unload_adapter(self, _number: int, value: dict[str, Any]) -> int:
        return await answered(self._engine.unload_adapter(value["name"]))

    async def _list_adapters(self, _number: int, _value: dict[str, Any]) -> Any:
        return to_plain(await answered(self._engine.list_adapters()))

    async def _flush_prefixes(self, _number: int, _value: dict[str, Any]) -> int:
        return await answered(self._engine.prefixes.flush())

    async def _watch_prefixes(self, number: int, value: dict[str, Any]) -> Any:
        return self._prefixes.open(number, await answered(self._engine.prefixes.watch(value["cache_salt"])))

    async def _prefix_contents(self, _number: int, value: dict[str, Any]) -> Any:
        return self._prefixes.contents(value["of"], value["start"])

    async def _prefix_changes(self, _number: int, value: dict[str, Any]) -> Any:
        return await self._prefixes.changes(value["of"])

    @property
    def _engine(self) -> Engine:
        return self._slot.require()

    def _mark(self, number: int) -> None:
        """A stream has something: all that do are read together, once the step has been handed out."""
        self._ready[number] = None
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._ready or self.link.full:
            return
        batch = EventBatch()
        ready, self._ready = self._ready, {}
        for number in ready:
            if number in self._streams:
                self._read(number, batch)
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
            batch.after.append([number, "error", error_to_plain(error)])
        if stream.ended:
            del self._streams[number]

    def _end(self, number: int) -> None:
        """The front end wants no more of a call: whatever it has running is aborted."""
        # Not left to the task: one that is cancelled before its first step never runs.
        call = self._calls.pop(number, None)
        if call is not None:
            call.cancel()
        if number in self._streams:
            self._close(self._streams.pop(number))
        if number in self._embeds:
            self._close(self._embeds.pop(number))
        if number in self._holds:
            self._holds.pop(number).release()
        self._prefixes.close(number)

    def _close(self, held: OutputStream | EmbedCall) -> None:
        task = asyncio.create_task(held.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _lost(self) -> None:
        """The front end is gone: its requests go too, those of others stay."""
        for number in [*self._calls, *self._streams, *self._embeds, *self._holds, *self._prefixes]:
            self._end(number)
        self._ready.clear()
        self.lost = True
        self.listening.set()
        self.serving.set()
        self._on_lost()


def _add(batch: EventBatch, number: int, event: OutputEvent) -> None:
    """The reader takes starts first, then plain deltas, then the rest in order; so may they be sorted here."""
    if type(event) is Delta:
        if event.logprobs:
            batch.after.append([number, "delta", to_plain(event)])
        else:
            batch.add(number, event)
    elif isinstance(event, Finished):
        batch.after.append([number, "finished", to_plain(event)])
    else:
        batch.before.append([number, to_plain(event)])


_METHODS: dict[str, Callable[[FrontEndHost, int, dict[str, Any]], Awaitable[Any]]] = {
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
    "flush_prefixes": FrontEndHost._flush_prefixes,
    "watch_prefixes": FrontEndHost._watch_prefixes,
    "prefix_contents": FrontEndHost._prefix_contents,
    "prefix_changes": FrontEndHost._prefix_changes,
}
