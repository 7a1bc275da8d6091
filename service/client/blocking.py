"""The client for programs without asyncio: the same calls, each of which blocks until it has its answer.

Calls are made by a `SlipstreamClient` on a thread of its own, so retries, attaching and errors are the same code.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from service.access.tls_credentials import ClientTls
from service.client.client import SlipstreamClient
from service.client.loop_thread import LoopThread

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[SlipstreamClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncSlipstreamClient, P], T]:
    @wraps(method)
    def call(self: SyncSlipstreamClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[SlipstreamClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[SyncSlipstreamClient, P], Generator[T, None, None]]:
    @wraps(method)
    def call(self: SyncSlipstreamClient, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return self._thread.iterate(method(self._client, *args, **kwargs))

    return call


class SyncSlipstreamClient:
    """A client of one server that blocks; arguments and methods are those of `SlipstreamClient`.

    Use it as a context manager, or `close` it. It may be used by several threads at once. Leaving the loop over
    `generate` early ends the call as it does there; break out of a loop and drop the iterator, or call its `close`.
    `on_started` is called on the client's own thread, where the client itself cannot be used.
    """

    def __init__(
        self,
        target: str,
        options: Sequence[tuple[str, Any]] = (),
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        fleet: bool = False,
    ) -> None:
        async def connect() -> SlipstreamClient:
            return SlipstreamClient(target, options, tls=tls, token=token, fleet=fleet)

        self._thread = LoopThread.acquire()
        self._open = True
        try:
            self._client = self._thread.run(connect())
        except BaseException:
            self._thread.release()
            raise

    def __enter__(self) -> SyncSlipstreamClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; live calls are cancelled. A second call does nothing."""
        if self._open:
            self._open = False
            self._thread.run(self._client.close())
            self._thread.release()

    generate = _iterating(SlipstreamClient.generate)
    attach = _iterating(SlipstreamClient.attach)
    complete = _blocking(SlipstreamClient.complete)
    embed = _blocking(SlipstreamClient.embed)
    abort = _blocking(SlipstreamClient.abort)
    tokenize = _blocking(SlipstreamClient.tokenize)
    detokenize = _blocking(SlipstreamClient.detokenize)
    load = _blocking(SlipstreamClient.load)
    model_info = _blocking(SlipstreamClient.model_info)
    server_info = _blocking(SlipstreamClient.server_info)
    is_loading = _blocking(SlipstreamClient.is_loading)
