"""Which caller calls, and whether it may: every method needs a token, unless the table METHODS says PUBLIC.

A refused call never has its message read: `RequestReads` is inside both interceptors of this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from service.access.caller import caller_name
from service.access.permissions import METHODS, Permission, Permissions, why_not
from service.access.reloaded_file import Reloaded
from service.access.token_file import TokenBook
from service.errors import NotPermitted, TokenRevoked, Unauthenticated
from service.rpc.interceptors import Context

AUTHORIZATION = "authorization"
SCHEME = "bearer"


class Authentication:
    """Refuses calls without a listed token, and ends live calls whose token is taken off the list.

    Runs inside `count_calls` and `errors_to_statuses`, so that its refusals are counted and have a status. The token of
    a live call is looked up again every `recheck_seconds`.
    """

    def __init__(self, tokens: Reloaded[TokenBook], recheck_seconds: float) -> None:
        self._tokens = tokens
        self._recheck = recheck_seconds

    @asynccontextmanager
    async def around(self, _method: str, context: Context) -> AsyncIterator[None]:
        """Run a call of a method that is not public inside, with its `caller_name`.

        Raises Unauthenticated without a listed token, and TokenRevoked when the token of the live call is revoked.
        """
        metadata: Any = context.invocation_metadata()
        presented = presented_token(metadata or ())
        caller = None if presented is None else self._tokens.current().find(presented)
        if caller is None:
            raise Unauthenticated("a valid bearer token is needed")
        caller_name.set(caller.name)
        # Never due by itself. `_Watch` lets it expire from a callback, and `expired()` then tells that apart from a
        # cancellation by another.
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


class Authorization:
    """Refuses callers by METHODS. Runs inside the interceptors that name callers."""

    def __init__(self, permissions: Permissions) -> None:
        self._permissions = permissions

    @asynccontextmanager
    async def around(self, method: str, _context: Context) -> AsyncIterator[None]:
        """Run a call of a method that takes more than `CALL` inside. Raises NotPermitted."""
        caller, permission = caller_name.get(), METHODS.get(method)
        if permission is None or not self._permissions.may(caller, permission):
            raise NotPermitted(why_not(caller, permission))
        yield


def needs_no_permission(method: str) -> bool:
    """Whether every caller may call `method`: its permission is PUBLIC or CALL."""
    return METHODS.get(method) in (Permission.PUBLIC, Permission.CALL)


class _Watch:
    """Asks `still_listed` every `seconds`, and lets `bound` expire once the answer is no."""

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
    """The token in the one `authorization: Bearer …` of `metadata`; None if there is none, or more than one."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    scheme, _, presented = values[0].partition(" ")
    return presented.strip() if scheme.lower() == SCHEME else None
