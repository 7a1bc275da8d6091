"""Turns of the messages of one caller: how many at once, how long each, and which gives way."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from core.errors import InvalidRequest, Overloaded
from service.access.caller import caller_name
from service.errors import RequestIncomplete
from service.limits import request_reads
from service.limits.request_reads import AT_ONCE, CALLS, PUBLIC, STREAMS, Lane, RequestReads
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.until import turns
from tests.support.within import within

FOREVER = 3600.0


class Call:
    """The context of a call whose message comes when the test says so."""

    def __init__(self, peer: str = "ipv4:10.0.0.1:4711") -> None:
        self._peer = peer
        self.asked = asyncio.Event()
        self._message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def peer(self) -> str:
        return self._peer

    async def read(self) -> Any:
        self.asked.set()
        return await self._message

    def send(self, message: Any = b"") -> None:
        """Have the message there."""
        self._message.set_result(message)


class Desk:
    """Reads for calls of one method; each is a task that ends with the request, or what it was refused with."""

    def __init__(self) -> None:
        self._reads = RequestReads(write_timeout=1.0)
        self._handler = grpc.unary_unary_rpc_method_handler(
            lambda *_: None, request_deserializer=pb.TokenizeRequest.FromString
        )

    def read(self, call: Call, lane: Lane = CALLS) -> asyncio.Task[Any]:
        return asyncio.create_task(self._reads._request(self._handler, call, lane))  # type: ignore[arg-type]

    @property
    def callers(self) -> int:
        return len(self._reads._callers)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes unless a test shortens one."""
    monkeypatch.setattr(CALLS, "seconds", FOREVER)
    monkeypatch.setattr(CALLS, "contended_seconds", FOREVER)


async def test_so_many_at_once_and_the_others_in_order() -> None:
    desk, calls = Desk(), [Call() for _ in range(AT_ONCE + 3)]
    reads = [desk.read(call) for call in calls]
    await turns(10)
    assert [call.asked.is_set() for call in calls] == [True] * AT_ONCE + [False] * 3
    calls[5].send(pb.TokenizeRequest(text="x").SerializeToString())
    assert (await reads[5]).text == "x"
    await turns(10)
    assert [call.asked.is_set() for call in calls[AT_ONCE:]] == [True, False, False]
    for call in calls[:5] + calls[6:]:
        call.send()
    await asyncio.gather(*reads)
    assert desk.callers == 0, "nothing is kept of callers without calls"


async def test_another_address_or_name_has_turns_of_its_own() -> None:
    desk = Desk()
    reads = [desk.read(Call(f"ipv4:10.0.0.1:{port}")) for port in range(AT_ONCE)]
    same, other, six, named = Call("ipv4:10.0.0.1:9"), Call("ipv4:10.0.0.2:9"), Call("ipv6:%5B::1%5D:9"), Call()
    reads += [desk.read(call) for call in (same, other, six)]
    token = caller_name.set("a tenant")
    reads.append(desk.read(named))
    caller_name.reset(token)
    await turns(10)
    assert [call.asked.is_set() for call in (same, other, six, named)] == [False, True, True, True]
    assert desk.callers == 4
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    assert desk.callers == 0


async def test_a_message_that_stands_still_gives_way_once_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, slow = Desk(), [Call() for _ in range(AT_ONCE)]
    reads = [desk.read(call) for call in slow]
    await turns(10)
    monkeypatch.setattr(CALLS, "contended_seconds", 0.02)
    late = Call()
    read = desk.read(late)
    async with within(5, "the messages that stand still are given up"):
        for ended in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(ended, RequestIncomplete)
        late.send()
        await read


async def test_alone_it_has_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CALLS, "contended_seconds", 0.0)
    desk, call = Desk(), Call()
    read = desk.read(call)
    await turns(10)
    assert not read.done()
    call.send()
    await read
    monkeypatch.setattr(CALLS, "seconds", 0.02)
    async with within(5, "but no more than that"):
        with pytest.raises(RequestIncomplete):
            await desk.read(Call())


async def test_as_many_as_have_a_turn_have_their_whole_time_and_one_more_shortens_it() -> None:
    desk, lane = Desk(), Lane(2, FOREVER, 0.0)
    reads = [desk.read(Call(), lane) for _ in range(2)]
    await turns(10)
    assert not any(read.done() for read in reads), "none waits for their turns"
    late = Call()
    read = desk.read(late, lane)
    async with within(5, "they give way to the one that waits"):
        for ended in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(ended, RequestIncomplete)
        late.send()
        await read


async def test_more_than_may_wait_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reads, "MOST_WAITING", 2)
    desk = Desk()
    reads = [desk.read(Call()) for _ in range(AT_ONCE + 2)]
    await turns(10)
    with pytest.raises(Overloaded) as refused:
        await desk.read(Call())
    assert refused.value.retry_after > 0
    assert not any(read.done() for read in reads)
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)


@pytest.mark.parametrize("sent", [grpc.aio.EOF, b"\xff\xff\xff"])
async def test_what_is_no_message_is_told(sent: Any) -> None:
    call = Call()
    call.send(sent)
    with pytest.raises(InvalidRequest, match="request: is"):
        await Desk().read(call)


async def test_public_methods_have_few_turns_of_their_own_for_small_messages() -> None:
    desk, asked = Desk(), [Call() for _ in range(PUBLIC.at_once + 1)]
    reads = [desk.read(call, PUBLIC) for call in asked]
    other = desk.read(Call(), CALLS)
    await turns(10)
    assert [call.asked.is_set() for call in asked] == [True] * PUBLIC.at_once + [False]
    assert PUBLIC.at_once < AT_ONCE and PUBLIC.most_bytes is not None
    asked[0].send(pb.TokenizeRequest(text="x" * PUBLIC.most_bytes).SerializeToString())
    with pytest.raises(InvalidRequest, match=f"takes {PUBLIC.most_bytes}"):
        await reads[0]
    asked[1].send()
    asked[2].send()
    await asyncio.gather(*reads[1:])
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_each_message_of_a_stream_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reflection takes a stream of requests: one of them that is half-sent was waited for as long as it pleased."""
    monkeypatch.setattr(STREAMS, "seconds", 0.02)
    seen: list[str] = []

    async def echo(requests: Any, _context: Any) -> Any:
        async for request in requests:
            seen.append(request.text)
            yield request

    handler = grpc.stream_stream_rpc_method_handler(echo, request_deserializer=pb.TokenizeRequest.FromString)
    reading: Any = RequestReads(write_timeout=1.0)._reading_each(handler).stream_stream
    call = Call()
    call.send(pb.TokenizeRequest(text="first").SerializeToString())
    answers = reading(None, call)
    assert (await anext(answers)).text == "first"
    silent = Call()
    call.read = silent.read  # type: ignore[method-assign]
    async with within(5, "the next one is not waited for"):
        with pytest.raises(RequestIncomplete):
            await anext(answers)
    assert seen == ["first"]
