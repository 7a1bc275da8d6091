"""The client for programs without asyncio: the same calls, each of which blocks until it has its answer.

Calls are made by a `SlipstreamClient` on a thread of its own, so retries, attaching and errors are the same code.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from service.access.tls_credentials import ClientTls
from service.client.blocking_calls import BlockingCalls
from service.client.client import SlipstreamClient

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[SlipstreamClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncSlipstreamClient, P], T]:
    @wraps(method)
    def call(self: SyncSlipstreamClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._calls.run(lambda: method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[SlipstreamClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[SyncSlipstreamClient, P], Generator[T, None, None]]:
    @wraps(method)
    def call(self: SyncSlipstreamClient, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return self._calls.iterate(method(self._client, *args, **kwargs))

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

        self._calls = BlockingCalls()
        try:
            self._client = self._calls.run(connect)
        except BaseException:
            self._calls.close()
            raise

    def __enter__(self) -> SyncSlipstreamClient:
        self._calls.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, call: Callable[[SlipstreamClient], Coroutine[Any, Any, T]]) -> T:
        """The result of `call` with the client inside, awaited on its own thread: for other services of the server."""
        return self._calls.run(lambda: call(self._client))

    def close(self) -> None:
        """Close the connection. Live calls end with CallFailed (CANCELLED), later ones with ValueError.

        A second call does nothing. Raises RuntimeError in a callback of the client, which stays open.
        """
        self._calls.close(self._client.close)

    generate = _iterating(SlipstreamClient.generate)
    attach = _iterating(SlipstreamClient.attach)
    complete = _blocking(SlipstreamClient.complete)
    embed = _blocking(SlipstreamClient.embed)
    classify = _blocking(SlipstreamClient.classify)
    score = _blocking(SlipstreamClient.score)
    abort = _blocking(SlipstreamClient.abort)
    tokenize = _blocking(SlipstreamClient.tokenize)
    detokenize = _blocking(SlipstreamClient.detokenize)
    load = _blocking(SlipstreamClient.load)
    model_info = _blocking(SlipstreamClient.model_info)
    server_info = _blocking(SlipstreamClient.server_info)
    is_loading = _blocking(SlipstreamClient.is_loading)
