"""Every arity and both kinds of handler go through the interceptors; none can leak an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc

from service.rpc.interceptors import AroundInterceptor, HandlerTracker, errors_to_statuses, wrap

SECRET = "secret /models/path 0x7f00deadbeef"


async def heard(request: Any) -> None:
    """Read a stream of requests to its end.

    A client that still writes when its call ends may see its write fail first: grpcio then says "Internal error from
    Core", and not what the server said.
    """
    if hasattr(request, "__aiter__"):
        async for _ in request:
            pass


async def unary(request: Any, context: Any) -> bytes:
    await heard(request)
    raise ValueError(SECRET)


async def stream_by_write(request: Any, context: Any) -> None:
    await heard(request)
    await context.write(b"first")
    raise ValueError(SECRET)


async def stream_by_yield(request: Any, context: Any) -> AsyncIterator[bytes]:
    await heard(request)
    yield b"first"
    raise ValueError(SECRET)


async def well(request: Any, context: Any) -> bytes:
    return b"well"


async def aborting(request: Any, context: Any) -> bytes:
    await context.abort(grpc.StatusCode.NOT_FOUND, "said on purpose")
    return b""


HANDLERS = {
    "unary_unary": grpc.unary_unary_rpc_method_handler(unary),
    "stream_unary": grpc.stream_unary_rpc_method_handler(unary),
    "unary_stream_write": grpc.unary_stream_rpc_method_handler(stream_by_write),
    "unary_stream_yield": grpc.unary_stream_rpc_method_handler(stream_by_yield),
    "stream_stream_write": grpc.stream_stream_rpc_method_handler(stream_by_write),
    "stream_stream_yield": grpc.stream_stream_rpc_method_handler(stream_by_yield),
    "well": grpc.unary_unary_rpc_method_handler(well),
    "aborting": grpc.unary_unary_rpc_method_handler(aborting),
}


@asynccontextmanager
async def channel_to_handlers(tracker: HandlerTracker) -> AsyncIterator[grpc.aio.Channel]:
    around = (tracker.around, errors_to_statuses)
    server = grpc.aio.server(interceptors=[AroundInterceptor(each) for each in around])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", HANDLERS),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def call(channel: grpc.aio.Channel, name: str) -> list[bytes]:
    """Call a handler in its own arity; all responses."""
    path = f"/test.Service/{name}"

    async def requests() -> AsyncIterator[bytes]:
        yield b"x"

    if name.startswith("unary_stream"):
        return [each async for each in channel.unary_stream(path)(b"x")]
    if name.startswith("stream_stream"):
        return [each async for each in channel.stream_stream(path)(requests())]
    if name.startswith("stream_unary"):
        return [await channel.stream_unary(path)(requests())]
    return [await channel.unary_unary(path)(b"x")]


@pytest.mark.parametrize("name", [name for name in HANDLERS if "ary" in name or "stream" in name])
async def test_no_arity_leaks_an_error(name: str) -> None:
    tracker = HandlerTracker()
    async with channel_to_handlers(tracker) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, name)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert failed.value.details() == "internal error"
    assert "secret" not in str(failed.value.trailing_metadata())
    assert len(tracker) == 0


async def test_results_and_deliberate_aborts_pass() -> None:
    async with channel_to_handlers(HandlerTracker()) as channel:
        assert await call(channel, "well") == [b"well"]
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "aborting")
        assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.NOT_FOUND, "said on purpose")


async def test_cancellation_is_raised_again() -> None:
    context = mock.create_autospec(grpc.aio.ServicerContext)
    with pytest.raises(asyncio.CancelledError):
        async with errors_to_statuses("m", context):
            raise asyncio.CancelledError
    assert not context.method_calls, "a call that was cancelled has no status of ours"


async def test_a_write_to_a_client_that_has_gone_is_no_incident(caplog: pytest.LogCaptureFixture) -> None:
    """The error is raised before grpc cancels the handler, if the client goes at the wrong moment."""
    context = mock.create_autospec(grpc.aio.ServicerContext)
    async with errors_to_statuses("m", context):
        raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 10")
    context.set_code.assert_called_once_with(grpc.StatusCode.CANCELLED)
    assert not caplog.records


def test_a_handler_in_a_thread_is_refused() -> None:
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    with pytest.raises(TypeError):
        wrap(handler, "/m", errors_to_statuses)


async def test_waiting_for_idle_is_bounded() -> None:
    tracker = HandlerTracker()
    assert await tracker.wait_idle(0.01)
    async with tracker.around("m", None):  # type: ignore[arg-type]
        assert len(tracker) == 1
        assert not await tracker.wait_idle(0.01)
    assert await tracker.wait_idle(0.01)
