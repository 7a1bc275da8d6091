"""The engine as a front end sees it: `core.engine.api.Engine`, over the connection to the engine process."""

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
from service.frontends.remote_control import RemoteControl
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
        """Ask the engine process for the vectors, once. Raises what `EmbedCall.result` does there."""
        return vectors_from_plain(await self._engine.call("vectors", of=self._number))

    async def aclose(self) -> None:
        """End the call in the engine process, which aborts what still runs. Idempotent."""
        self._engine.end(self._number)


class RemoteEngine:
    """The `Engine` of a front end: each method asks the engine process and raises what the engine raised there.

    `state`, `stats` and `live_requests` are those of the last STATE frame, which comes every 0.1 s. A lost connection
    is a dead engine. A stream may keep `max_pending_tokens` unread. Event-loop thread only.
    """

    def __init__(self, max_pending_tokens: int) -> None:
        self.link = Link(self._frame, self._lost)
        self.closing: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Done when the engine process sends CLOSE or is gone; the result is whether the engine is dead."""
        self.draining = asyncio.Event()
        """Set when the server must report not ready; it still takes calls."""
        self.leaving = asyncio.Event()
        """Set when new calls are to be turned away."""
        self._max_pending = max_pending_tokens
        self._gone = "the engine failed; this server is going away"
        """What callers are told once the connection is lost."""
        self._unread = UnreadBytes()
        self._state = EngineState.STARTING
        self._stats = EngineStats()
        self._live = 0
        self._ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self.control = RemoteControl(self.call)
        self._number = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, RemoteStream] = {}

    @property
    def state(self) -> EngineState:
        """The state in the last STATE frame; STARTING before the first, DEAD once the connection is lost."""
        return self._state

    @property
    def stats(self) -> EngineStats:
        """The snapshot in the last STATE frame, without its histograms; an empty one before the first."""
        return self._stats

    @property
    def lanes(self) -> None:
        """None: steps run in the engine's process."""
        return None

    @property
    def open_streams(self) -> None:
        """None: the engine's process knows the streams, and shows them."""
        return None

    @property
    def live_requests(self) -> int:
        """Streams opened and not yet ended, of all front ends."""
        return self._live

    def full(self, tenant: str) -> bool:
        """False: what is known here is up to 0.1 s old, in which a queue can empty. The engine refuses by itself."""
        return False

    @property
    def model_info(self) -> ModelInfo:
        """Facts of the served model, from the READY frame. Raises InvalidStateError before it came."""
        return self._ready.result()

    @property
    def prefixes(self) -> RemotePrefixes:
        """The prefix cache of the engine process."""
        return RemotePrefixes(self)

    async def start(self) -> RemoteEngine:
        """Wait until the engine process is ready; returns itself. Raises EngineDead if that process goes away first."""
        await asyncio.shield(self._ready)
        return self

    async def generate(self, request: GenerateRequest) -> RemoteStream:
        """Send the request to the engine process; return its stream once it is admitted to the waiting queue there.

        Raises what `Engine.generate` does, and what `pack_json` does for a request that no frame can hold.
        """
        number = self._next()
        outputs, room = request.sampling.n, self._unread
        stream = RemoteStream(request.request_id, outputs, lambda: self.end(number), self._max_pending, room)
        await self._begin(number, stream, request)
        return stream

    async def _begin(self, number: int, stream: RemoteStream, request: GenerateRequest) -> None:
        # Before the question: events can arrive together with the reply, before this task runs again.
        self._streams[number] = stream
        try:
            stream.request_id = await self._ask(number, "generate", request=to_plain(request))
        except BaseException:
            self._streams.pop(number, None)
            raise

    async def entered(self, tenant: str, deadline: float | None, work: Work) -> tuple[int, float]:
        """Wait for a place in the tenant's gate. Returns the number with which `end` gives it back, and the weight."""
        return await self.open("enter", tenant=tenant, deadline=deadline, work=to_plain(work))

    async def resumed(self, method: str, known_as: str, **arguments: Any) -> RemoteReader:
        """Call `method` of the engine process's desk, "open" or "attach". Returns a reader of the kept stream.

        `known_as` is the request id. Raises what the method raises.
        """
        number = self._next()
        reader = RemoteReader(known_as, lambda: self.end(number), self._max_pending, self._unread)
        self._streams[number] = reader
        try:
            said = await self._ask(number, method, **arguments)
        except BaseException:
            self._streams.pop(number, None)
            raise
        if "started" in said:
            reader.push(from_plain(Started, said["started"]))
        if not reader.expect(said["outputs"], said["want_text"]):
            self._streams.pop(number, None)
        return reader

    async def embed(self, request: EmbedRequest) -> RemoteEmbedCall:
        """Send the request to the engine process; return once every input is in the waiting queue there."""
        number, request_id = await self.open("embed", request=to_plain(request))
        return RemoteEmbedCall(self, number, request_id)

    async def abort(self, request_id: str) -> bool:
        """End the request as CANCELLED if it is live. Returns whether it was. Idempotent."""
        return bool(await self.call("abort", request_id=request_id))

    async def tokenize(self, text: str, add_special_tokens: bool = True, caller: str = "") -> list[int]:
        """Ids of `text`. Raises InvalidRequest when it cannot be encoded or is too long."""
        ids: list[int] = await self.call("tokenize", text=text, special=add_special_tokens, caller=caller)
        return ids

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True, caller: str = "") -> str:
        """Text of `ids`. Raises InvalidRequest for ids outside the vocabulary."""
        return str(await self.call("detokenize", ids=list(ids), skip=skip_special_tokens, caller=caller))

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterLoad:
        """Have the engine process read the LoRA adapter in `path` and serve it as `name`. Raises as `Engine` says."""
        return from_plain(AdapterLoad, await self.call("load_adapter", name=name, path=path, pinned=pinned))

    async def unload_adapter(self, name: str) -> int:
        """Refuse new requests for the adapter. Returns the number that still use it. Raises AdapterNotFound."""
        return int(await self.call("unload_adapter", name=name))

    async def list_adapters(self) -> AdapterList:
        """Every adapter that holds memory in the engine process."""
        return from_plain(AdapterList, await self.call("list_adapters"))

    async def drain(self, timeout: float) -> int:
        """No-op, 0 streams cut: the engine process drains by itself."""
        return 0

    async def stop(self) -> None:
        """Close the connection; the engine process then ends the requests that this front end still has."""
        self.link.close()

    async def wait_dead(self) -> BaseException:
        """Return the cause once the engine is dead or its process is gone; never returns after an ordinary close."""
        if await asyncio.shield(self.closing):
            return EngineDead("the engine failed; this server is going away")
        return await asyncio.Future()

    def count(self, counts: Counter[tuple[str, tuple[str, ...]]]) -> None:
        """Send a COUNTS frame: `counts` by counter name and labels."""
        self.link.send(pack_json(Kind.COUNTS, [[name, labels, amount] for (name, labels), amount in counts.items()]))

    def fail_streams(self, error: SlipstreamError) -> None:
        """End every stream that is still open here with `error`."""
        # Taken out first: what is called for one stream can end another one.
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def end(self, number: int, used: int = 0) -> None:
        """Have the engine end call `number`; a tenant's place is given back with `used` tokens. Idempotent."""
        self._streams.pop(number, None)
        self.link.send(pack_json(Kind.END, {"used": used}, number) if used else pack(Kind.END, number=number))

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call `method` of the engine process and return the answer. Raises what it raised there, and EngineDead."""
        return await self._ask(self._next(), method, **arguments)

    async def open(self, method: str, **arguments: Any) -> tuple[int, Any]:
        """As `call`, for a call that the engine process keeps until `end`. Returns its number and the answer."""
        number = self._next()
        return number, await self._ask(number, method, **arguments)

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _ask(self, number: int, method: str, **arguments: Any) -> Any:
        if self._state is EngineState.DEAD:
            raise EngineDead(self._gone)
        call = pack_json(Kind.CALL, {"method": method, **arguments}, number)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self.link.send(call)
        try:
            return await reply
        except asyncio.CancelledError:
            # The engine may have answered already, and would hold what it opened for a caller that is gone.
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
        """Take a frame about the server as a whole: READY, STATE or CLOSE. Raises WireError for another kind."""
        if kind is Kind.READY:
            self._ready.set_result(from_plain(ModelInfo, value))
        elif kind is Kind.STATE:
            self._state, self._live = EngineState(value["state"]), value["live"]
            self._stats = from_plain(EngineStats, value["stats"])
            self.control.heard(self._stats.activity)
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
        """End a stream whose event cannot be read, here and in the engine's process. The other streams go on."""
        self._streams[number].fail(RequestFailed(UNREADABLE))
        self.end(number)

    def _lost(self) -> None:
        """The engine process is gone: streams and open questions end with EngineDead, to clients UNAVAILABLE."""
        self._state = EngineState.DEAD
        waiting: list[asyncio.Future[Any]] = [*self._replies.values(), self._ready]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDead(self._gone))
                future.exception()  # retrieved: asyncio would log it where no task waits
        if not self.closing.done():
            self.closing.set_result(True)
        self.fail_streams(EngineDead(self._gone))
