"""A stream that goes on over broken connections asks for what follows, in tokens and in bytes, as often as it must."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from service.client import CallFailed, resumed_call
from service.client.resumed_call import ATTEMPTS, ResumedCall
from service.pb.slipstream.v1 import inference_pb2 as pb

LOST = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "connection lost")


class Call:
    """One call: its responses, after which the connection is lost unless they end the stream."""

    def __init__(self, responses: Sequence[pb.GenerateResponse]) -> None:
        self._responses = responses

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        for response in self._responses:
            yield response
        if not self._responses or not self._responses[-1].HasField("finished"):
            raise LOST

    def cancel(self) -> None:
        """Nothing is held."""


class Wire:
    """The server as a stub shows it: each call takes the next script, and what was asked for is kept."""

    fleet, metadata = False, ()

    def __init__(self, *scripts: Sequence[pb.GenerateResponse]) -> None:
        self.stub = self
        self.attached: list[pb.AttachRequest] = []
        self.aborts = 0
        self._scripts = iter(scripts)

    def Generate(self, request: pb.GenerateRequest, **_: Any) -> Call:
        return Call(next(self._scripts))

    def Attach(self, request: pb.AttachRequest, **_: Any) -> Call:
        self.attached.append(request)
        return Call(next(self._scripts))

    async def Abort(self, request: pb.AbortRequest, **_: Any) -> None:
        self.aborts += 1


def resumed(wire: Any) -> ResumedCall:
    return ResumedCall(wire, pb.GenerateRequest(request_id="mine"), None)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumed_call, "FIRST_BACKOFF", 0.0)


async def test_each_attach_names_the_tokens_and_bytes_that_have_come() -> None:
    """More often than fruitless attempts are made in a row, since each brings something."""
    deltas = [
        pb.GenerateResponse(delta=pb.Delta(index=0, position=2 * at, token_ids=[1, 2], text="é"))
        for at in range(2 * ATTEMPTS)
    ]
    end = pb.GenerateResponse(finished=pb.Finished(index=0))
    wire = Wire(*([delta] for delta in deltas), [end])
    try:
        seen = [response async for response in resumed(wire).events()]
    except CallFailed as failed:
        pytest.fail(f"given up after {len(wire.attached)} attaches: {failed}")
    assert seen == [*deltas, end] and wire.aborts == 0
    places = [(each.tokens, each.text_bytes, each.finished) for asked in wire.attached for each in asked.positions]
    assert places == [(2 * count, 2 * count, False) for count in range(1, 2 * ATTEMPTS + 1)]


async def test_each_attach_names_the_stream_that_was_begun() -> None:
    started = pb.GenerateResponse(started=pb.Started(incarnation="third"))
    delta = pb.GenerateResponse(delta=pb.Delta(index=0, token_ids=[1]))
    wire = Wire([], [started, delta], [], [pb.GenerateResponse(finished=pb.Finished(index=0))])
    assert len([response async for response in resumed(wire).events()]) == 3
    assert [asked.incarnation for asked in wire.attached] == ["", "third", "third"]


async def test_attaches_that_bring_nothing_come_to_an_end() -> None:
    wire = Wire(*([] for _ in range(3 * ATTEMPTS)))
    with pytest.raises(CallFailed, match="connection lost"):
        _ = [response async for response in resumed(wire).events()]
    assert (len(wire.attached), wire.aborts) == (ATTEMPTS, 1)
