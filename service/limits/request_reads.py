"""The one message of a request, and of an answer: read and written here instead of by gRPC, each within a time.

gRPC itself reads the message of a unary request before it runs the handler. It waits for it as long as the connection
lives, and holds room for the whole message meanwhile. Two connections with 256 half-sent messages each held 2 GiB so,
without a token. Here every handler is registered as one of streams both ways, which is the same on the wire. Of such a
message gRPC takes in no more than the window of flow control (`service.rpc.channel_options.UNREAD_BYTES`) before the
handler asks for it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from core.errors import InvalidRequest, Overloaded
from service.access.caller import address_of, caller_name
from service.access.permissions import is_public
from service.errors import RequestIncomplete
from service.limits.unread_answers import UnreadAnswers
from service.rpc.interceptors import Context, Handler, MethodInterceptor

AT_ONCE: Final = 16
"""Messages of one caller that are read at once: a message that is there whole takes a fraction of a millisecond."""


@dataclass(slots=True, eq=False)
class Lane:
    """The rules by which messages of some methods are read. Calls of one caller in one lane share its turns: they wait
    neither for other callers nor for calls in other lanes."""

    at_once: int
    """Messages of one caller that are read at once."""
    seconds: float
    """Time that a message may take from the moment it is asked for."""
    contended_seconds: float
    """The same while other calls of its caller wait for their turn."""
    most_bytes: int | None = None
    """Largest message; None: the server's own limit."""


CALLS: Final = Lane(AT_ONCE, 10.0, 1.0)
STREAMS: Final = Lane(AT_ONCE, 10.0, 1.0)
"""For methods that take streams of requests. A stream without a next message holds a turn while it is waited for; in a
lane of its own it does not keep other calls from theirs."""
PUBLIC: Final = Lane(2, 2.0, 0.1, most_bytes=4096)
"""For methods that need no token. Their messages fit the window of a call, so a message is there whole as soon as it
was sent. gRPC has one limit on messages for all methods, so a larger message is refused here, with few turns."""
MOST_WAITING: Final = 4096
"""Calls of one caller in one lane that may wait for their turn."""
REASON: Final = "REQUEST_READS"


class RequestReads(MethodInterceptor):
    """Reads each request's message and hands it to the handler. The innermost interceptor: a call that another one
    refuses never has its message read.

    A caller is a name where calls have one, else an address without its port. An answer of one message is written
    within `write_timeout` seconds, or the call ends with SlowConsumer, as a stream does. gRPC itself would keep the
    answer for as long as the connection lives, and count the call as successful.
    """

    def __init__(self, write_timeout: float) -> None:
        super().__init__()
        self._write_timeout = write_timeout
        self._callers: dict[tuple[Lane, str], _Caller] = {}

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """The handler as one of streams both ways, which gets its messages from here."""
        if handler.request_streaming:
            return self._reading_each(handler)
        return self._reading(handler, PUBLIC if is_public(method) else CALLS)

    def _reading(self, handler: Handler, lane: Lane) -> Handler:
        # The annotations are those of the synchronous servers.
        inner: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary
        encode: Any = handler.response_serializer or bytes

        async def answer(_requests: Any, context: Context) -> None:
            async with self._caller(context, lane) as caller:
                caller.answers.refuse_if_full()
                # Encoded here, so that its size is known, and so that the message is not kept beside its bytes.
                response = encode(await inner(await self._request(handler, context, lane), context))
                await caller.answers.write(context, response, self._write_timeout)

        async def call(_requests: Any, context: Context) -> None:
            await inner(await self._request(handler, context, lane), context)

        async def generate(_requests: Any, context: Context) -> AsyncIterator[Any]:
            async with aclosing(inner(await self._request(handler, context, lane), context)) as responses:
                async for response in responses:
                    yield response

        behaviour: Callable[..., Any] = call if handler.response_streaming else answer
        if inspect.isasyncgenfunction(inner):
            behaviour = generate
        return grpc.stream_stream_rpc_method_handler(
            behaviour,
            request_deserializer=None,
            response_serializer=handler.response_serializer if handler.response_streaming else None,
        )

    def _reading_each(self, handler: Handler) -> Handler:
        """For a stream of requests: each message has the time of one, also while the client has not begun it.

        A half-sent message cannot be told from one that is yet to come.
        """
        if not (handler.response_streaming and inspect.isasyncgenfunction(handler.stream_stream)):
            raise TypeError("streams of requests are read for async generator functions only")
        inner: Any = handler.stream_stream

        async def messages(context: Context) -> AsyncIterator[Any]:
            while (message := await self._received(handler, context, STREAMS)) is not grpc.aio.EOF:
                yield message

        async def generate(_requests: Any, context: Context) -> AsyncIterator[Any]:
            async with aclosing(inner(messages(context), context)) as responses:
                async for response in responses:
                    yield response

        return grpc.stream_stream_rpc_method_handler(
            generate, request_deserializer=None, response_serializer=handler.response_serializer
        )

    async def _request(self, handler: Handler, context: Context, lane: Lane = CALLS) -> Any:
        """The message of a call.

        Raises RequestIncomplete if it was not there in time, Overloaded if too many calls of the caller wait, and
        InvalidRequest if it is missing, too large or no message of the method.
        """
        received = await self._received(handler, context, lane)
        if received is grpc.aio.EOF:
            raise InvalidRequest.of("request", "is missing: the call was closed without a message")
        return received

    async def _received(self, handler: Handler, context: Context, lane: Lane) -> Any:
        """The next message of a call, or EOF. Raises what `_request` does."""
        async with self._caller(context, lane) as caller:
            received = await caller.read(context)
        if received is grpc.aio.EOF:
            return received
        if lane.most_bytes is not None and len(received) > lane.most_bytes:
            raise InvalidRequest.of("request", f"has {len(received)} bytes; this method takes {lane.most_bytes}")
        try:
            return received if handler.request_deserializer is None else handler.request_deserializer(received)
        except DecodeError:
            raise InvalidRequest.of("request", "is not a protobuf message of this method") from None

    @asynccontextmanager
    async def _caller(self, context: Context, lane: Lane) -> AsyncIterator[_Caller]:
        """The state of the call's caller in one lane. It is kept while a call of the caller waits, reads or writes."""
        key = caller_name.get() or address_of(context.peer())
        caller = self._callers.setdefault((lane, key), _Caller(lane))
        caller.users += 1
        try:
            yield caller
        finally:
            caller.users -= 1
            if not caller.users:
                del self._callers[lane, key]


class _Caller:
    """One caller in one lane: the messages being read, the calls that wait for their turn, and the unread answers."""

    def __init__(self, lane: Lane) -> None:
        self.users = self._calls = 0
        self.answers = UnreadAnswers()
        self._lane = lane
        self._turns = asyncio.Semaphore(lane.at_once)
        self._reading: dict[asyncio.Timeout, float] = {}
        """For each message being read, its bound and the loop time at which the read began."""

    async def read(self, context: Context) -> Any:
        """The bytes of the next message, or EOF. Raises RequestIncomplete and Overloaded."""
        if self._calls >= self._lane.at_once + MOST_WAITING:
            raise Overloaded("too many calls of this client wait for their request to be read", reason=REASON)
        self._calls += 1
        try:
            if self._turns.locked():
                self._hurry()
            async with self._turns:
                return await self._received(context)
        finally:
            self._calls -= 1

    async def _received(self, context: Context) -> Any:
        began = asyncio.get_running_loop().time()
        lane = self._lane
        try:
            seconds = lane.contended_seconds if self._calls > lane.at_once else lane.seconds
            async with asyncio.timeout(seconds) as bound:
                self._reading[bound] = began
                return await context.read()
        except TimeoutError:
            raise RequestIncomplete("the request did not arrive in time") from None
        finally:
            del self._reading[bound]

    def _hurry(self) -> None:
        """A call now waits for its turn: shorten the bounds of the reads at work to `contended_seconds`."""
        now = asyncio.get_running_loop().time()
        for bound, began in self._reading.items():
            until, latest = bound.when(), max(now, began + self._lane.contended_seconds)
            if not bound.expired() and until is not None and latest < until:
                bound.reschedule(latest)
