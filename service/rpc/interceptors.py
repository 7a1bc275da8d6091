"""What happens around every call, whatever its arity: errors become statuses, handlers are tracked, calls are counted.

grpc.aio tells coroutine handlers from async generators by inspection, so a wrapper must be of the kind that it wraps.
`wrap` does that once; everything else is an async context manager around one call.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from service.metrics.rpc import RpcMetrics
from service.process.logs import is_lost_client
from service.rpc.status import LOST, status_of, write_status

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Around = Callable[[str, Context], AbstractAsyncContextManager[None]]
"""Makes, from the full method name and the call's context, the context manager in which its handler runs."""

_ARITIES: dict[tuple[bool, bool], tuple[str, Callable[..., Handler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class MethodInterceptor(grpc.aio.ServerInterceptor):
    """Serves each known method by a handler that `wrapped` makes of its own, once. Unknown methods pass through."""

    def __init__(self) -> None:
        self._handlers: dict[str, tuple[Handler, Handler]] = {}
        """By method: the original handler, and the one made of it."""

    @abstractmethod
    def wrapped(self, handler: Handler, method: str) -> Handler:
        """The handler that serves `method` in place of `handler`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of the call, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None:
            # For None grpc answers UNIMPLEMENTED.
            return None
        method: str = handler_call_details.method
        known = self._handlers.get(method)
        if known is None or known[0] is not handler:
            known = self._handlers[method] = handler, self.wrapped(handler, method)
        return known[1]


class AroundInterceptor(MethodInterceptor):
    """Runs every known method inside `around(method, context)`, except methods for which `spares(method)` is true."""

    def __init__(self, around: Around, spares: Callable[[str], bool] = lambda _method: False) -> None:
        super().__init__()
        self._around, self._spares = around, spares

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """The handler inside `around`."""
        return handler if self._spares(method) else wrap(handler, method, self._around)


def wrap(handler: Handler, method: str, around: Around) -> Handler:
    """`handler` inside `around`, of the same arity and kind of coroutine. Raises TypeError for any other kind."""
    attribute, build = _ARITIES[bool(handler.request_streaming), bool(handler.response_streaming)]
    inner = getattr(handler, attribute)

    async def call(request: Any, context: Context) -> Any:
        async with around(method, context):
            return await inner(request, context)

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        async with around(method, context):
            # Closed here, so that the handler's `finally` blocks run inside `around` when the call is cancelled.
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response

    if inspect.isasyncgenfunction(inner):
        wrapped: Callable[..., Any] = generate
    elif inspect.iscoroutinefunction(inner):
        wrapped = call
    else:
        raise TypeError(f"the handler of {method} is neither a coroutine function nor an async generator function")
    return build(
        wrapped, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )


@asynccontextmanager
async def errors_to_statuses(_method: str, context: Context) -> AsyncIterator[None]:
    """End a failed call with the status of its error. Cancellation and grpc's own aborts pass untouched.

    A write may meet a client that has gone before grpc cancels the handler: that call ends as cancelled, too.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of native code too: grpc.aio would leave its call without a status
        write_status(context, LOST if is_lost_client(error) else status_of(error))


class HandlerTracker:
    """The set of handlers that have started and not yet returned.

    `server.stop` returns before cancelled handlers have run their `finally` blocks, so shutdown waits for this set.
    """

    def __init__(self) -> None:
        self._live: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    @asynccontextmanager
    async def around(self, _method: str, _context: Context) -> AsyncIterator[None]:
        """Count one call as live while it runs."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._live.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._live.discard(task)
            if not self._live:
                self._idle.set()

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no handler is live, `timeout` seconds at most. Returns whether that came in time."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def count_calls(metrics: RpcMetrics) -> Around:
    """Count calls started and handled, by method and code. Only known methods get here, so label sets are closed."""

    @asynccontextmanager
    async def around(method: str, context: Context) -> AsyncIterator[None]:
        metrics.started(method)
        try:
            yield
        except BaseException as error:
            metrics.handled(method, final_code(context, error))
            raise
        metrics.handled(method, final_code(context, None))

    return around


def final_code(context: Context, error: BaseException | None) -> grpc.StatusCode:
    """The code with which a call ends; `error` is the exception that left its handler, None if it returned."""
    if isinstance(error, asyncio.CancelledError):
        remaining = context.time_remaining()
        late = remaining is not None and remaining <= 0
        return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
    return _code(context, grpc.StatusCode.OK if error is None else grpc.StatusCode.UNKNOWN)


def _code(context: Context, default: grpc.StatusCode) -> grpc.StatusCode:
    """The code set on the call. The annotation says StatusCode; grpc.aio gives an int, 0 when none was set."""
    code: Any = context.code()
    return _CODES.get(getattr(code, "value", (code,))[0], default) if code else default


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
