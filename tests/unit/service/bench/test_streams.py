"""What `slipstream bench service` says of streams: by hand, on a clock that only the streams move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from service.bench import stream_rate
from service.bench.raw_stream import RawServer
from service.bench.service import Width, _latency_figures, _line
from service.bench.stream_client import Job, opener
from service.bench.stream_rate import Latencies, Rate, measure_latencies, measure_rate
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.fakes.hand_clock import HandClock, by_hand


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return by_hand(monkeypatch, stream_rate)


async def test_the_first_and_the_last_tenth_are_not_in_a_rate(clock: HandClock) -> None:
    async def stream() -> AsyncIterator[int]:
        for at in range(50):
            clock.work(1.0 if 5 <= at < 45 else 60.0)
            yield 2

    assert await measure_rate(stream, 1, 100) == Rate(2.0, 1.0)


async def test_only_what_comes_while_all_streams_run_is_in_a_rate(clock: HandClock) -> None:
    """One stream begins late: before that the other has the server for itself."""
    opened = iter([True, False])

    async def stream() -> AsyncIterator[int]:
        first = next(opened)
        for _ in range(40):
            while not first and clock.now < 120.0:
                await asyncio.sleep(0)
            clock.work(1.0 if clock.now < 120.0 else 0.25)
            yield 1
            await asyncio.sleep(0)

    rate = await measure_rate(stream, 2, 40)
    assert rate.tokens_per_second == pytest.approx(4.0)


async def test_the_first_token_is_no_gap(clock: HandClock) -> None:
    async def stream() -> AsyncIterator[int]:
        clock.work(5.0)
        yield 1
        for seconds in (1.0, 2.0):
            clock.work(seconds)
            yield 1
        clock.work(70.0)

    assert await measure_latencies(stream, 2) == Latencies([5.0, 5.0], [1.0, 2.0, 1.0, 2.0])


def test_latencies_are_told_in_milliseconds() -> None:
    told = _latency_figures(Latencies([0.1] * 3, [0.001 * at for at in range(101)]))
    assert told == {
        "ttft_p50_ms": 100.0,
        "ttft_p90_ms": 100.0,
        "ttft_p99_ms": 100.0,
        "itl_p50_ms": 50.0,
        "itl_p90_ms": 90.0,
        "itl_p99_ms": 99.0,
    }


def test_shares_are_medians_of_the_shares_within_a_round() -> None:
    def rates(*values: float) -> list[Rate]:
        return [Rate(value, value / 2) for value in values]

    width = Width(
        raw=rates(1000, 200, 400),
        lock_step=rates(500, 400, 400),
        engine=rates(200, 1000, 800),
        flat_out=rates(100, 100, 300),
        paced_in_process=rates(100, 50, 80),
        paced=rates(90, 50, 40),
    )
    found = width.figures()
    assert found["share_of_raw"] == 0.5 and found["share_of_lock_step"] == 0.25
    # The slower of both bounds ours: the engine in the first round, raw grpc.aio in the others.
    assert found["share_of_the_slower"] == 0.5
    assert (found["tokens_per_second"], found["raw_tokens_per_second"]) == (100, 400)
    assert (found["tokens_per_message"], found["speed_kept"]) == (2.0, 0.9)
    assert "50% of raw, 25% in lock step" in _line(3, found) and "(90.0%)" in _line(3, found)


async def test_messages_without_a_token_are_no_messages() -> None:
    """Started and Finished come beside the tokens."""
    asked: list[pb.GenerateRequest] = []

    class Channel:
        def unary_stream(self, method: str, **_: Any) -> Any:
            async def call(message: pb.GenerateRequest) -> AsyncIterator[Any]:
                asked.append(message)
                for ids in ((), (1,), (2, 3), ()):
                    yield SimpleNamespace(delta=pb.Delta(token_ids=ids))

            return call

    read = opener(Channel(), Job(1, "/m", 1, tokens=3, prompt=2))  # type: ignore[arg-type]
    assert [count async for count in read()] == [1, 2]
    assert (asked[0].sampling_params.max_tokens, list(asked[0].token_ids.ids)) == (3, [3, 4])


async def test_raw_streams_begin_when_all_are_open() -> None:
    """Else the first would have the ceiling for itself."""
    raw = RawServer()
    raw.expect(2)
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(max_tokens=2))
    first, second = (raw._generate(request, None) for _ in range(2))
    begun = asyncio.ensure_future(anext(first))
    for _ in range(9):
        await asyncio.sleep(0)
    assert not begun.done()
    assert len((await anext(second)).delta.token_ids) == len((await begun).delta.token_ids) == 1
    assert len([each async for each in first]) == 1, "a message per token"
    await raw._grpc.stop(None)
