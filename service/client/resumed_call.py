"""A stream that goes on over broken connections: `Generate` once, then `Attach` from where it broke off.

The position from which the server must go on is counted from the responses themselves, so it is exact.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from service.client.errors import CallFailed
from service.pb.slipstream.v1 import inference_pb2 as pb

ATTEMPTS = 6
"""Calls in a row without a response, after which the stream is given up."""

FIRST_BACKOFF, LONGEST_BACKOFF = 0.05, 2.0
"""Seconds."""


@dataclass(slots=True)
class Received:
    """The part of one output that the caller has: ids, bytes of its text in UTF-8, and whether it is complete."""

    tokens: int = 0
    text_bytes: int = 0
    finished: bool = False


class Connection(Protocol):
    """The attributes of a `SlipstreamClient` that its calls use; `fleet`: its target is several servers."""

    fleet: bool
    metadata: tuple[tuple[str, str], ...]
    stub: Any


def attach_request(request_id: str, received: Mapping[int, Received], incarnation: str) -> pb.AttachRequest:
    """The Attach message that asks for everything after `received`, by output; `incarnation` is that of `started`."""
    return pb.AttachRequest(
        request_id=request_id,
        incarnation=incarnation,
        positions=[
            pb.AttachPosition(index=index, tokens=each.tokens, text_bytes=each.text_bytes, finished=each.finished)
            for index, each in sorted(received.items())
        ],
    )


async def responses(call: Any) -> AsyncGenerator[Any, None]:
    """The responses of a call, which is cancelled when the reader leaves early. Raises CallFailed."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise CallFailed(error) from None
    finally:
        call.cancel()


class ResumedCall:
    """One resumable request; `request` must have an id. `timeout` is in seconds, for all its calls together.

    Leaving `events` early aborts the request.
    """

    def __init__(self, client: Connection, request: pb.GenerateRequest, timeout: float | None) -> None:
        self._client, self._request = client, request
        loop = asyncio.get_running_loop()
        self._clock, self._due = loop.time, None if timeout is None else loop.time() + timeout
        self._received: dict[int, Received] = {}
        self._incarnation = ""
        self._fruitless = 0

    async def events(self) -> AsyncGenerator[Any, None]:
        """Responses of all calls, as if the connection had never broken. Raises CallFailed."""
        call, broke = self._generate(), None
        over = False
        try:
            while True:
                try:
                    async for response in responses(call):
                        self._count(response)
                        yield response
                    over = True
                    return
                except CallFailed as failed:
                    if not self._may_go_on(failed):
                        over = failed.code is not grpc.StatusCode.UNAVAILABLE
                        # Raise the error that broke the connection, not the NOT_FOUND of the attach after it.
                        raise (broke or failed) from None
                    broke = broke if _is_gone(failed) else failed
                    await self._pause()
                    call = self._generate() if self._unknown(failed) else self._attach()
        finally:
            if not over:
                await self._abort()

    def _generate(self) -> Any:
        return self._client.stub.Generate(self._request, timeout=self._left(), metadata=self._client.metadata)

    def _attach(self) -> Any:
        request = attach_request(self._request.request_id, self._received, self._incarnation)
        return self._client.stub.Attach(request, timeout=self._left(), metadata=self._client.metadata)

    def _left(self) -> float | None:
        return None if self._due is None else max(0.0, self._due - self._clock())

    def _may_go_on(self, failed: CallFailed) -> bool:
        """Whether another call may go on with the stream.

        True where the connection broke and not the request, and where a server does not have the stream but another
        server of the fleet may. False after ATTEMPTS calls in a row without a response.
        """
        self._fruitless += 1
        lost = failed.code is grpc.StatusCode.UNAVAILABLE and not failed.reason
        elsewhere = _is_gone(failed) and (self._client.fleet or not self._received)
        return (lost or elsewhere) and self._fruitless <= ATTEMPTS

    def _unknown(self, failed: CallFailed) -> bool:
        """Whether the request seems not to have arrived: then `Generate` is sent again, which loses nothing."""
        return _is_gone(failed) and not self._received

    async def _pause(self) -> None:
        # At random, so that many clients that lost one server do not come back at the same moment.
        longest = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2**self._fruitless)
        await asyncio.sleep(random.uniform(0.5, 1.0) * longest)

    def _count(self, response: Any) -> None:
        self._fruitless = 0
        kind = response.WhichOneof("event")
        if kind == "started":
            self._incarnation = response.started.incarnation
        elif kind == "delta":
            place = self._received.setdefault(response.delta.index, Received())
            place.tokens += len(response.delta.token_ids)
            place.text_bytes += len(response.delta.text.encode())
        elif kind == "finished":
            self._received.setdefault(response.finished.index, Received()).finished = True

    async def _abort(self) -> None:
        """Abort the request on the server, within 1 s. An error is ignored: the server drops the stream in time."""
        request = pb.AbortRequest(request_id=self._request.request_id)
        try:
            await self._client.stub.Abort(request, timeout=1.0, metadata=self._client.metadata)
        except grpc.aio.AioRpcError:
            return


def _is_gone(failed: CallFailed) -> bool:
    return failed.code is grpc.StatusCode.NOT_FOUND and failed.reason.startswith("STREAM_")
