"""Who calls, and whether it may: all but public methods need a bearer token, also those yet to be written.

A refused call never has its message read: the refusal is another handler, chosen before grpc looks at the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from service.auth_tokens import Caller, TokenBook
from service.interceptors import Around, Context, wrap
from service.permissions import METHODS, Permission, Permissions, is_public, why_not
from service.reloaded import Reloaded
from service.status import NotPermitted, TokenRevoked, Unauthenticated

AUTHORIZATION = "authorization"
SCHEME = "bearer"

caller_name: ContextVar[str | None] = ContextVar("slipstream_caller", default=None)
"""Within a call: the name beside the caller's token, or in its certificate; None where callers have none."""


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a listed token, and ends those whose token is taken off the list.

    Goes behind those that count refusals and turn them into statuses. A live call is looked at every `recheck_seconds`.
    """

    def __init__(self, tokens: Reloaded[TokenBook], recheck_seconds: float) -> None:
        self._tokens = tokens
        self._recheck = recheck_seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler itself on public methods, the handler under watch for a known caller, else a refusal."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or is_public(method):
            return handler
        metadata: Any = handler_call_details.invocation_metadata
        presented = presented_token(metadata or ())
        caller = None if presented is None else self._tokens.current().find(presented)
        return _REFUSAL if caller is None else wrap(handler, method, self._while_listed(caller))

    def _while_listed(self, caller: Caller) -> Around:
        @asynccontextmanager
        async def around(_method: str, _context: Context) -> AsyncIterator[None]:
            caller_name.set(caller.name)
            # Never due by itself: it is the one way to end this task from a callback and still know that it was us.
            bound = asyncio.timeout(None)
            watch = _Watch(lambda: self._tokens.current().holds(caller), self._recheck, bound)
            try:
                async with bound:
                    watch.begin()
                    yield
            except TimeoutError:
                if not bound.expired():
                    raise
                raise TokenRevoked("the token of this call was revoked") from None
            finally:
                watch.end()

        return around


class PermissionInterceptor(grpc.aio.ServerInterceptor):
    """Refuses callers by METHODS, before their message is read. Goes behind the one that names callers."""

    def __init__(self, permissions: Permissions) -> None:
        self._permissions = permissions

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler itself where every caller may call, else the handler behind a look at the caller's name."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        permission = METHODS.get(method)
        if handler is None or permission is Permission.PUBLIC or permission is Permission.CALL:
            return handler
        return wrap(handler, method, self._around)

    @asynccontextmanager
    async def _around(self, method: str, _context: Context) -> AsyncIterator[None]:
        caller, permission = caller_name.get(), METHODS.get(method)
        if permission is None or not self._permissions.may(caller, permission):
            raise NotPermitted(why_not(caller, permission))
        yield


class _Watch:
    """Asks `still_listed` every `seconds` and lets `bound` expire once it is not."""

    def __init__(self, still_listed: Callable[[], bool], seconds: float, bound: asyncio.Timeout) -> None:
        self._still_listed = still_listed
        self._seconds = seconds
        self._bound = bound
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Look after `seconds` for the first time."""
        self._timer = self._loop.call_later(self._seconds, self._look)

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._still_listed():
            self.begin()
        else:
            self._bound.reschedule(self._loop.time())


def presented_token(metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
    """The token of the one `authorization: Bearer …`; None for anything else, two of them included."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    scheme, _, presented = values[0].partition(" ")
    return presented.strip() if scheme.lower() == SCHEME else None


async def _refuse(_requests: Any, _context: Context) -> None:
    raise Unauthenticated("a valid bearer token is needed")


# Streaming both ways, whatever was called: grpc reads the message of a unary request before it runs the handler.
_REFUSAL: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)
