"""The device breaks: one row, one step, the whole thread. Each harms what it must, and every stream is told."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import pytest

from tests.chaos.conftest import Launch
from tests.chaos.device import Faults, expected
from tests.chaos.history import FULL, Stream, Verdict
from tests.chaos.process import PATIENCE, ServerProcess, settled
from tests.chaos.readers import ask, read, verdict
from tests.chaos.watching import Diary, watched
from tests.support.scorecard import Scorecard

STREAMS, TOKENS = 30, 2000
HANG_TIMEOUT = 1.0
NAN_AT, FORGOTTEN = 300, 500
"""The position at which logits turn NaN, and the length at which a row loses its relayed token."""


@pytest.fixture(scope="module")
def flawed() -> Iterator[ServerProcess]:
    """Breaks single rows, and survives it."""
    faults = Faults(nan_at_position=NAN_AT, forget_at_length=FORGOTTEN)
    server = ServerProcess(faults, max_running_requests=64, max_total_tokens=64 * 1024)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def reaching(position: int, vocab: int, rng: random.Random, margin: int = 20) -> Stream:
    """A request whose outputs pass `position`."""
    return Stream([rng.randrange(vocab) for _ in range(position - margin)], 2 * margin, f"doomed{rng.getrandbits(32)}")


async def test_non_finite_logits_fail_their_own_request_only(
    flawed: ServerProcess, seed: int, scorecard: Scorecard
) -> None:
    rng = random.Random(seed + 5)
    async with flawed.client() as client:
        vocab = (await client.model_info()).vocab_size
        doomed = [reaching(NAN_AT, vocab, rng) for _ in range(3)]
        others = [ask(vocab, 200, rng) for _ in range(20)]
        await asyncio.gather(*(read(client, stream) for stream in (*doomed, *others)))
        again = await read(client, ask(vocab, 50, rng))
    hit = sum(stream.terminals == ["REQUEST_FAILED"] for stream in doomed)
    scorecard(18, f"of {len(doomed)} rows planted, rows hit", hit, equals=len(doomed))
    equal = sum(verdict([stream], vocab) == Verdict() and stream.terminals == [FULL] for stream in others)
    scorecard(18, "of 20 others, bit-equal", equal, equals=20)
    assert verdict([*doomed, again], vocab) == Verdict()
    # The token sampled at the position itself is the first that nobody may see.
    assert [stream.received for stream in doomed] == [NAN_AT - len(stream.prompt) + 1 for stream in doomed]
    failed = (await flawed.metrics())['slipstream_requests_finished_total{reason="request_failed"}']
    assert failed == hit
    await settled(flawed)


async def test_a_violated_device_check_is_counted_on_the_metrics_page(flawed: ServerProcess, seed: int) -> None:
    series = 'slipstream_assert_failures_total{check="relay_unwritten_read"}'
    assert (await flawed.metrics())[series] == 0
    async with flawed.client() as client:
        vocab = (await client.model_info()).vocab_size
        stream = await read(client, reaching(FORGOTTEN, vocab, random.Random(seed)))
        other = await read(client, ask(vocab, 50, random.Random(seed)))
    assert (await flawed.metrics())[series] == 1
    assert stream.terminals == ["REQUEST_FAILED"], "no token that follows from a lost one"
    assert stream.received == FORGOTTEN - len(stream.prompt) + 1 and verdict([stream, other], vocab) == Verdict()
    assert other.terminals == [FULL], "counted, not trapped"
    await settled(flawed)


LATE = 300
"""The step of the end: all streams have come by then, and none on its way while the server goes."""
DEATHS: dict[str, tuple[int, Faults, float]] = {
    "raises": (17, Faults(raise_at=LATE), 2.0),
    "thread exits": (20, Faults(exit_at=LATE), HANG_TIMEOUT + 3.0),
    "hangs": (20, Faults(hang_at=LATE), HANG_TIMEOUT + 3.0),
    "trapped": (20, Faults(forget_at_length=LATE), 2.0),
}
"""Row of the scorecard, fault, and the seconds within which the process must be gone once it happened."""


@pytest.mark.alone
@pytest.mark.parametrize("way", DEATHS)
async def test_a_broken_device_ends_every_stream_once_and_then_the_process(
    launch: Launch, way: str, seed: int, scorecard: Scorecard
) -> None:
    row, faults, bound = DEATHS[way]
    mode = "trap" if way == "trapped" else "count"
    server = launch(faults, max_running_requests=16, hang_timeout=HANG_TIMEOUT, assert_mode=mode)
    rng = random.Random(seed + 6)
    async with server.client() as client:
        vocab = (await client.model_info()).vocab_size
        async with watched(client, Diary()) as diary:
            # Half of them run, half wait in the queue.
            streams = [ask(vocab, TOKENS, rng) for _ in range(STREAMS)]
            await asyncio.wait_for(asyncio.gather(*(read(client, stream) for stream in streams)), PATIENCE)
            ended = time.monotonic()
            code, _ = await server.exit_code(PATIENCE)
            last_token = max(at for stream in streams for _, _, at in stream.events)
            told, gone = ended - last_token, time.monotonic() - last_token
            await diary.wait_for("liveness", "NOT_SERVING", 1.0)
    found = verdict(streams, vocab)
    with_terminal = sum(stream.terminals == ["ENGINE_DEAD"] for stream in streams)
    scorecard(row, f"{way}: of {STREAMS} streams, told", with_terminal, equals=STREAMS)
    assert found == Verdict()
    scorecard(row, f"{way}: seconds from the last token to every terminal", told, at_most=bound)
    scorecard(row, f"{way}: seconds from the last token to the exit", gone, at_most=bound)
    scorecard(row, f"{way}: exit code", code, equals=1)
    fallen = [*diary.of("readiness")[:1], *diary.of("liveness")[:1]]
    scorecard(24, f"engine dead ({way}): both services before the end", fallen, equals=["NOT_SERVING"] * 2)
    assert "/secret" not in repr([stream.terminals for stream in streams])


async def test_the_emulated_device_is_what_the_checker_expects(flawed: ServerProcess) -> None:
    """Otherwise every history here would be judged by a wrong standard."""
    async with flawed.client() as client:
        vocab = (await client.model_info()).vocab_size
        (done,) = await client.complete([7, 8], max_tokens=5, temperature=0.0, ignore_eos=True)
    assert list(done.token_ids) == expected([7, 8], 5, vocab)
