"""The ceiling: the least that grpc.aio can do for the same messages. No engine, no interceptors, no bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from queue import SimpleQueue
from typing import Any

import grpc
import grpc.aio

from core.engine.wakeup import Wakeup
from service.pb.slipstream.v1 import inference_pb2 as pb

RAW_METHOD = "/slipstream.bench.Raw/Generate"
LOCK_STEP_METHOD = "/slipstream.bench.Raw/GenerateInLockStep"
_SERVICE, _NAME = RAW_METHOD[1:].split("/")
_LOCK_STEP_NAME = LOCK_STEP_METHOD.rpartition("/")[2]
REQUEST_ID = "0123456789abcdef0123456789abcdef"


class _Thread:
    """A thread in the engine's place: it is asked for a step, and reports that it is done. The step takes no time.

    The loop asks for the next step when every stream has written its token. So each step costs one hand-over to the
    thread and one back, whatever the number of streams.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._made = Wakeup()
        self._waiting: list[asyncio.Future[None]] = []
        self._streams = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._task = asyncio.create_task(self._hand_out())

    def opened(self, streams: int) -> None:
        """`streams` streams take part in every step from now on."""
        self._streams = streams

    def ended(self) -> None:
        """One stream has ended and takes part in no further step."""
        self._streams -= 1
        self._ask_if_all_wait()

    async def token(self) -> None:
        """Wait for the next step."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._ask_if_all_wait()
        await waiter

    def close(self) -> None:
        """End the thread."""
        self._task.cancel()
        self._asked.put(False)
        self._thread.join()
        self._made.close()

    def _ask_if_all_wait(self) -> None:
        if self._waiting and len(self._waiting) == self._streams:
            self._asked.put(True)

    def _run(self) -> None:
        while self._asked.get():
            self._made.set_threadsafe()

    async def _hand_out(self) -> None:
        while True:
            await self._made.wait()
            waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)


class RawServer:
    """A server of two methods on a free loopback port; each token is a message of its own.

    `RAW_METHOD` writes tokens as fast as gRPC takes them, `LOCK_STEP_METHOD` one per stream and step of another thread.
    Both begin when as many streams are open as were announced by `expect`.
    """

    def __init__(self) -> None:
        self._grpc = grpc.aio.server()
        behaviours = {_NAME: self._generate, _LOCK_STEP_NAME: self._generate_in_lock_step}
        handlers = {
            name: grpc.unary_stream_rpc_method_handler(
                behaviour,
                request_deserializer=pb.GenerateRequest.FromString,
                response_serializer=pb.GenerateResponse.SerializeToString,
            )
            for name, behaviour in behaviours.items()
        }
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        self.port = self._grpc.add_insecure_port("127.0.0.1:0")
        self.expect(1)

    def expect(self, streams: int) -> None:
        """The next job opens `streams` streams, all at once."""
        self._streams, self._barrier = streams, asyncio.Barrier(streams)

    async def start(self) -> None:
        """Begin to serve."""
        self._thread = _Thread()
        await self._grpc.start()

    async def close(self) -> None:
        """Close all streams at once, and end the thread."""
        await self._grpc.stop(None)
        self._thread.close()

    async def _generate(self, request: pb.GenerateRequest, _context: Any) -> AsyncIterator[pb.GenerateResponse]:
        await self._barrier.wait()
        for position in range(request.sampling_params.max_tokens):
            yield _response(position)

    async def _generate_in_lock_step(
        self, request: pb.GenerateRequest, _context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self._thread.opened(self._streams)
        await self._barrier.wait()
        for position in range(request.sampling_params.max_tokens):
            await self._thread.token()
            yield _response(position)
        self._thread.ended()


def _response(position: int) -> pb.GenerateResponse:
    delta = pb.Delta(position=position, token_ids=(200 + position % 200,), text=" token")
    return pb.GenerateResponse(request_id=REQUEST_ID, delta=delta)
