"""SIGTERM from outside: who learns what in which order, what finishes, what is cut, and when the process is gone."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from tests.chaos.conftest import Launch
from tests.chaos.device import Faults
from tests.chaos.history import FULL, Verdict
from tests.chaos.process import PATIENCE
from tests.chaos.readers import ask, endings, read, verdict
from tests.chaos.watching import Diary, knock, watched
from tests.support.scorecard import Scorecard

pytestmark = pytest.mark.alone

LINGER, GRACE = 0.5, 1.5
MARGIN = 3.0
"""Seconds that ending, flushing and joining may take on two shared cores."""

LOADS = {"idle": (0, 0), "50 short": (50, 100), "100 long": (100, 4000)}


@pytest.mark.parametrize("load", LOADS)
async def test_sigterm_is_a_drain_in_order(launch: Launch, load: str, seed: int, scorecard: Scorecard) -> None:
    count, tokens = LOADS[load]
    server = launch(max_running_requests=128, max_total_tokens=512 * 1024, drain_linger=LINGER, drain_grace=GRACE)
    rng = random.Random(seed + 7)
    async with server.client() as client, server.client() as caller:
        vocab = (await client.model_info()).vocab_size
        streams = [ask(vocab, tokens, rng) for _ in range(count)]
        async with watched(client, Diary()) as diary:
            reading = [asyncio.create_task(read(client, stream)) for stream in streams]
            async with asyncio.timeout(PATIENCE):
                while not all(stream.events for stream in streams):
                    await asyncio.sleep(0.01)
            knocking = asyncio.create_task(knock(caller, diary))
            await diary.wait_for("caller", "OK", PATIENCE)
            diary.write("operator", "SIGTERM")
            server.send(signal.SIGTERM)
            await asyncio.gather(*reading)
            diary.write("streams", "ended")
            code, _ = await server.exit_code(PATIENCE)
            diary.write("process", "gone")
            knocking.cancel()
            await asyncio.gather(knocking, return_exceptions=True)
    seconds = _between(diary, ("operator", "SIGTERM"), ("process", "gone"))
    scorecard(21, f"{load}: tokens lost or wrong, terminals missing", _faults(verdict(streams, vocab)), equals=[0] * 3)
    due = {} if not count else {FULL: 50} if load == "50 short" else {"DRAINING": 100}
    scorecard(21, f"{load}: endings", dict(endings(streams)), equals=due)
    scorecard(21, f"{load}: exit code", code, equals=0)
    bound = (LINGER + GRACE if load == "100 long" else LINGER + 1.0) + MARGIN
    scorecard(21, f"{load}: seconds to the exit", seconds, at_most=bound)
    assert verdict(streams, vocab) == Verdict()
    if load == "100 long":
        assert all(stream.reported == stream.received > 0 for stream in streams), "trailers say what was sent"
    _check_order(diary, cut=load == "100 long")


def _check_order(diary: Diary, cut: bool) -> None:
    """Readiness falls first; calls are taken for the linger, then nobody is let in; watches end last."""
    assert diary.of("readiness") == ["NOT_SERVING", "ended UNAVAILABLE DRAINING"]
    assert diary.of("liveness") == ["ended UNAVAILABLE DRAINING"], "alive to the end"
    answers = diary.of("caller")
    flipped, answered = diary.first("readiness", "NOT_SERVING"), [at for at, who, _ in diary.entries if who == "caller"]
    assert flipped is not None
    taken = [at for at, word in zip(answered, answers) if word == "OK"]
    assert max(taken) >= flipped + 0.5 * LINGER, "taken after readiness fell"
    refusals = [word for word in answers if word != "OK"]
    assert answers == ["OK"] * len(taken) + refusals, "once refused, always refused"
    if cut:
        # CANCELLED: it was on its way when the server said that it goes, which gRPC cannot tell it any better.
        assert set(refusals) <= {"transport UNAVAILABLE", "transport CANCELLED"}, (
            "the port is closed to new calls while streams drain"
        )
        first = next(at for at, word in zip(answered, answers) if word != "OK")
        ended = diary.first("streams", "ended")
        assert ended is not None and first < ended, "streams outlive the port"


def _between(diary: Diary, first: tuple[str, str], second: tuple[str, str]) -> float:
    one, two = diary.first(*first), diary.first(*second)
    assert one is not None and two is not None
    return two - one


def _faults(found: Verdict) -> list[int]:
    return [found.missing, found.wrong + found.duplicated + found.beyond, found.terminals]


@pytest.mark.soak
async def test_sigterm_ends_a_server_whose_device_hangs(launch: Launch, seed: int, scorecard: Scorecard) -> None:
    """No watchdog helps before its time: every wait of the drain has its own bound."""
    server = launch(Faults(hang_at=50), drain_grace=0.2)
    async with server.client() as client:
        vocab = (await client.model_info()).vocab_size
        stream = ask(vocab, 4000, random.Random(seed))
        reading = asyncio.create_task(read(client, stream))
        async with asyncio.timeout(PATIENCE):
            while (await server.probe()).step < 48:
                await asyncio.sleep(0.01)
        server.send(signal.SIGTERM)
        code, seconds = await server.exit_code(40.0)
        await reading
    assert verdict([stream], vocab) == Verdict()
    scorecard(21, "hung device: exit code", code, equals=0)
    scorecard(21, "hung device: seconds to the exit", seconds, at_most=20)
