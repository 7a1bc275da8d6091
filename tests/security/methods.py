"""Every method that a server has, as grpc was told of it, and a call of any of them with bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

Handler = Any  # grpc.RpcMethodHandler, which cannot be subscripted at run time
Metadata = tuple[tuple[str, str], ...]


@contextmanager
def registered() -> Iterator[dict[str, Handler]]:
    """Fills with whatever is registered on servers made inside, whoever registers it."""
    found: dict[str, Handler] = {}
    # `grpc.aio.Server` is only the interface.
    kind = type(grpc.aio.server())
    add = kind.add_generic_rpc_handlers

    def spy(self: Any, handlers: Any) -> None:
        for each in handlers:
            found.update(each._method_handlers)
        add(self, handlers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "add_generic_rpc_handlers", spy)
        yield found


async def call(
    channel: grpc.aio.Channel, method: str, handler: Handler, raw: bytes = b"", metadata: Metadata = ()
) -> None:
    """Send `raw` and take the first answer; AioRpcError if the call fails.

    A method that streams requests is sent one too, as a unary call, which is the same on the wire. A refusal ends such
    a call before it reads, and a client of `grpc.aio` that writes a stream of requests then may see INTERNAL instead.
    """
    streams = bool(handler.response_streaming)
    starter: Any = channel.unary_stream if streams else channel.unary_unary
    started = starter(method)(raw, metadata=metadata, timeout=10)
    if streams:
        try:
            await started.read()
        finally:
            started.cancel()
    else:
        await started


async def code_of(
    channel: grpc.aio.Channel, method: str, handler: Handler, raw: bytes = b"", metadata: Metadata = ()
) -> grpc.StatusCode:
    """The code that `call` ends with, OK included."""
    try:
        await call(channel, method, handler, raw, metadata)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
