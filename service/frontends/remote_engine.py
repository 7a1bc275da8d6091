"""The engine as a front end sees it: the door of `core.engine.api`, over the connection to the engine process."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from core.engine.api import EngineState
from core.engine.streams.unread import UnreadBytes
from core.errors import EngineDead, RequestFailed, SlipstreamError
from core.types.adapters import AdapterList, AdapterLoad
from core.types.io import EmbedRequest, EmbedResult, Finished, GenerateRequest, ModelInfo, Started
from core.types.plain import to_plain
from core.types.stats import EngineStats
from service.frontends.events import read_events
from service.frontends.plain_json import UNREADABLE, error_from_plain, from_plain, vectors_from_plain
from service.frontends.remote_prefixes import RemotePrefixes
from service.frontends.remote_stream import RemoteReader, RemoteStream
from service.frontends.wire import Kind, Link, WireError, pack, pack_json
from service.limits.work import Work

log = logging.getLogger(__name__)


class RemoteEmbedCall:
    """The `EmbedCall` of `core.engine.api` in a front end."""

    def __init__(self, engine: RemoteEngine, number: int, request_id: str) -> None:
        self._engine, self._number, self.request_id = engine, number, request_id

    async def result(self) -> EmbedResult:
        """See `EmbedCall.result`."""
        return vectors_from_plain(await self._engine.call("vectors", of=self._number))

    async def aclose(self) -> None:
        """See `EmbedCall.aclose`."""
        self._engine.end(self._number)


class RemoteEngine:
    """Answers as the engine does. Its snapshot is that of the last STATE frame; a lost connection is a dead engine."""

    def __init__(self, max_pending_tokens: int) -> None:
        self.link = Link(self._frame, self._lost)
        self.closing: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Done when the engine process says to close: whether the engine is dead."""
        self.draining = asyncio.Event()
        self.leaving = asyncio.Event()
        """Set when new calls are to be turned away."""
        self._max_pending = max_pending_tokens
        self._unread = UnreadBytes()
        self._state = EngineState.STARTING
        self._stats = EngineStats()
        self._live = 0
        self._ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._number = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, RemoteStream] = {}

    @property
    def state(self) -> EngineState:
        """See `Engine.state`."""
        return self._state

    @property
    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self._stats

    @property
    def lanes(self) -> None:
        """Steps run in the engine's process."""
        return None

    @property
    def open_streams(self) -> None:
        """Shown by the engine's process."""
        return None

    @property
    def live_requests(self) -> int:
        """Of all front ends."""
        return self._live

    def full(self, tenant: str) -> bool:
        """What is known here is a tenth of a second old, in which a queue empties: the engine refuses by itself."""
        return False

    @property
    def model_info(self) -> ModelInfo:
        """See `Engine.model_info`."""
        return self._ready.result()

    @property
    def prefixes(self) -> RemotePrefixes:
        """See `Engine.prefixes`."""
        return RemotePrefixes(self)

    async def start(self) -> None:
        """Wait until the engine process is ready. Raises EngineDead when it goes away first."""
        await asyncio.shield(self._ready)

    async def generate(self, request: GenerateRequest) -> RemoteStream:
        """See `Engine.generate`."""
        number = self._next()
        stream = RemoteStream(
            request.request_id, request.sampling.n, lambda: self.end(number), self._max_pending, self._unread
        )
        self._streams[number] = stream
        try:
            stream.request_id = await self._ask(number, "generate", request=to_plain(request))
        except BaseException:
            self._streams.pop(number, None)
            raise
        return stream

    async def entered(self, tenant: str, deadline: float | None, work: Work) -> tuple[int, float]:
        """A place in the tenant's gate, which `end` gives back, and the tenant's weight."""
        return await self.open("enter", tenant=tenant, deadline=deadline, work=to_plain(work))

    async def resumed(self, method: str, known_as: str, **arguments: Any) -> RemoteReader:
        """What `open` or `attach` of the desk give: a kept stream, from some place on."""
        number = self._next()
        reader = RemoteReader(known_as, lambda: self.end(number), self._max_pending, self._unread)
        self._streams[number] = reader
        try:
            said = await self._ask(number, method, **arguments)
        except BaseException:
            self._streams.pop(number, None)
            raise
        if not reader.expect(said["outputs"], said["want_text"]):
            self._streams.pop(number, None)
        return reader

    async def embed(self, request: EmbedRequest) -> RemoteEmbedCall:
        """See `Engine.embed`."""
        number, request_id = await self.open("embed", request=to_plain(request))
        return RemoteEmbedCall(self, number, request_id)

    async def abort(self, request_id: str) -> bool:
        """See `Engine.abort`."""
        return bool(await self.call("abort", request_id=request_id))

    async def tokenize(self, text: str, add_special_tokens: bool = True, caller: str = "") -> list[int]:
        """See `Engine.tokenize`."""
        ids: list[int] = await self.call("tokenize", text=text, special=add_special_tokens, caller=caller)
        return ids

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True, caller: str = "") -> str:
        """See `Engine.detokenize`."""
        return str(await self.call("detokenize", ids=list(ids), skip=skip_special_tokens, caller=caller))

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterLoad:
        """See `Engine.load_adapter`."""
        return from_plain(AdapterLoad, await self.call("load_adapter", name=name, path=path, pinned=pinned))

    async def unload_adapter(self, name: str) -> int:
        """See `Engine.unload_adapter`."""
        return int(await self.call("unload_adapter", name=name))

    async def list_adapters(self) -> AdapterList:
        """See `Engine.list_adapters`."""
        return from_plain(AdapterList, await self.call("list_adapters"))

    async def drain(self, timeout: float) -> int:
        """The engine process drains by itself; there is nothing to do here."""
        return 0

    async def stop(self) -> None:
        """Hang up, which ends what this front end still has."""
        self.link.close()

    async def wait_dead(self) -> BaseException:
        """Once the engine process is gone without having said so."""
        if await asyncio.shield(self.closing):
            return EngineDead("the engine failed; this server is going away")
        return await asyncio.Future()

    def count(self, counts: Counter[tuple[str, tuple[str, ...]]]) -> None:
        """Send what was counted."""
        self.link.send(pack_json(Kind.COUNTS, [[name, labels, amount] for (name, labels), amount in counts.items()]))

    def fail_streams(self, error: SlipstreamError) -> None:
        """End what is still open here; most often nothing."""
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()

    def end(self, number: int, used: int = 0) -> None:
        """Have the engine end call `number`; a tenant's place is given back with the tokens `used`. Idempotent."""
        self._streams.pop(number, None)
        self.link.send(pack_json(Kind.END, {"used": used}, number) if used else pack(Kind.END, number=number))

    async def call(self, method: str, **arguments: Any) -> Any:
        """Ask and wait for the answer. Raises what the engine raised."""
        return await self._ask(self._next(), method, **arguments)

    async def open(self, method: str, **arguments: Any) -> tuple[int, Any]:
        """As `call`, for what the engine keeps until `end`: its number, and the answer."""
        number = self._next()
        return number, await self._ask(number, method, **arguments)

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _ask(self, number: int, method: str, **arguments: Any) -> Any:
        if self._state is EngineState.DEAD:
            raise _dead()
        call = pack_json(Kind.CALL, {"method": method, **arguments}, number)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self.link.send(call)
        try:
            return await reply
        except asyncio.CancelledError:
            self.end(number)
            raise
        finally:
            del self._replies[number]

    def _frame(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.EVENTS:
            self._take(body)
        elif kind is Kind.REPLY:
            self._reply(number, body)
        else:
            self._hear(kind, json.loads(body))

    def _hear(self, kind: Kind, value: Any) -> None:
        """What is said of the server as a whole."""
        if kind is Kind.READY:
            self._ready.set_result(from_plain(ModelInfo, value))
        elif kind is Kind.STATE:
            self._state, self._live = EngineState(value["state"]), value["live"]
            self._stats = from_plain(EngineStats, value["stats"])
            if value["draining"]:
                self.draining.set()
            if value["leaving"]:
                self.leaving.set()
        elif kind is not Kind.CLOSE:
            raise WireError(f"{kind.name} from the engine's process")
        elif not self.closing.done():
            self.closing.set_result(bool(value["dead"]))

    def _reply(self, number: int, body: bytes) -> None:
        reply = self._replies.get(number)
        if reply is None or reply.done():
            return
        try:
            value = json.loads(body)
            failed = None if "ok" in value else error_from_plain(value)
        except Exception:
            log.exception("a reply of the engine's process cannot be read")
            self.end(number)
            failed = RequestFailed(UNREADABLE)
        if failed is None:
            reply.set_result(value["ok"])
        else:
            reply.set_exception(failed)

    def _take(self, body: bytes) -> None:
        before, deltas, after = read_events(body)
        streams = self._streams
        for number, started in before:
            if number in streams:
                self._tell(number, Started, started)
        for number, delta in deltas:
            stream = streams.get(number)
            if stream is None:
                continue
            if delta is None:
                self._break(number)
            else:
                stream.push(delta)
        for number, kind, value in after:
            if number in streams:
                self._take_end(number, kind, value)

    def _take_end(self, number: int, kind: str, value: Any) -> None:
        if kind == "finished":
            self._tell(number, Finished, value)
            if number in self._streams and self._streams[number].output_finished():
                del self._streams[number]
            return
        try:
            failed = error_from_plain(value)
        except Exception:
            failed = RequestFailed(UNREADABLE)
        self._streams.pop(number).fail(failed)

    def _tell(self, number: int, kind: type[Started | Finished], value: Any) -> None:
        try:
            event = from_plain(kind, value)
        except Exception:
            log.exception("an event of the engine's process cannot be read")
            self._break(number)
        else:
            self._streams[number].push(event)

    def _break(self, number: int) -> None:
        """What was said of a stream cannot be read: it ends, here and in the engine's process. Its neighbours go on."""
        self._streams[number].fail(RequestFailed(UNREADABLE))
        self.end(number)

    def _lost(self) -> None:
        """The engine process is gone: everything ends with UNAVAILABLE."""
        self._state = EngineState.DEAD
        self.fail_streams(_dead())
        waiting: list[asyncio.Future[Any]] = [*self._replies.values(), self._ready]
        for future in waiting:
            if not future.done():
                future.set_exception(_dead())
                future.exception()  # retrieved: nobody may be waiting
        if not self.closing.done():
            self.closing.set_result(True)


def _dead() -> SlipstreamError:
    return EngineDead("the engine failed; this server is going away")
