"""The wall clock of a running server is set, forward and back: nothing that waits, ends or is kept goes by it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from service.client import CallFailed, Chunk, End, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.chaos.device import Faults
from tests.chaos.process import PATIENCE, ServerProcess
from tests.support.repository import ROOT
from tests.support.scorecard import Scorecard

SOURCE = ROOT / "tests" / "support" / "fakes" / "wall_clock.c"
HOURS = 3600
TOKENS = 200
"""A second of a stream."""
Jump = Callable[[int], None]
EXPECTED = [TOKENS, TOKENS, "DEADLINE_EXCEEDED", TOKENS]
JUMPS = {"forward": 5 * HOURS, "back": -5 * HOURS}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clock to preload, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("clock") / "wall_clock.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(made), "-ldl"], check=True, timeout=60)
    return made


def test_the_clock_that_is_preloaded_is_the_one_that_python_reads(shim: Path, tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("q", 1000 * HOURS))
    env = os.environ | {"SLIPSTREAM_FAKE_WALL": str(offset), "LD_PRELOAD": str(shim)}
    script = "import time; print(time.time(), time.time_ns() / 1e9, time.monotonic())"
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    moved = [
        float(theirs) - ours for theirs, ours in zip(done.stdout.split(), (time.time(), time.time(), time.monotonic()))
    ]
    assert [round(each / HOURS) for each in moved] == [1000, 1000, 0]


@pytest.fixture
async def jumping(
    shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ServerProcess, Jump]]:
    """A server of 200 tokens a second, and what sets its wall clock to so many seconds from the machine's."""
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("q", 0))
    monkeypatch.setenv("SLIPSTREAM_FAKE_WALL", str(offset))
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    server = ServerProcess(
        Faults(step_seconds=0.005), drain_grace=20, resume_seconds=30, max_request_seconds=60, auth_recheck_seconds=1
    )
    monkeypatch.delenv("LD_PRELOAD")

    def jump(seconds: int) -> None:
        with offset.open("r+b") as file:
            file.write(struct.pack("q", seconds))

    try:
        server.wait_ready()
        assert os.fspath(shim) in Path(f"/proc/{server.pid}/maps").read_text()
        yield server, jump
    finally:
        server.close()


async def told(
    events: AsyncIterator[Chunk | End], *, after: int = TOKENS, then: Callable[[], None] = lambda: None
) -> int | str:
    """How many tokens came, or the status that ended them; `then` happens once `after` have come."""
    count = 0
    try:
        async for event in events:
            before, count = count, count + (len(event.token_ids) if isinstance(event, Chunk) else 0)
            if before < after <= count:
                then()
    except CallFailed as failed:
        return failed.code.name
    return count


def asked(client: SlipstreamClient, timeout: float) -> AsyncIterator[Chunk | End]:
    return client.generate("hello", max_tokens=TOKENS, ignore_eos=True, timeout=timeout)


@pytest.mark.parametrize("way", JUMPS)
async def test_streams_deadlines_and_kept_streams_do_not_go_by_the_wall_clock(
    jumping: tuple[ServerProcess, Jump], way: str, scorecard: Scorecard
) -> None:
    server, jump = jumping
    async with server.client() as client, asyncio.timeout(PATIENCE):
        # Over the jump, and after it, with a deadline each.
        outcomes = [
            await told(asked(client, 15.0), after=20, then=lambda: jump(JUMPS[way])),
            await told(asked(client, 15.0)),
            await told(asked(client, 0.5)),
        ]
        # Left behind before the clock is set back to where it was, and taken up after it.
        sampling = pb.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(request_id="kept", text="hello", resumable=True, sampling_params=sampling)
        call = client.stub.Generate(request)
        await call.read()
        call.cancel()
        jump(0)
        outcomes.append(await told(client.attach("kept", timeout=15.0)))
        scorecard(23, f"wall clock {way}: two streams, a deadline, a kept stream", outcomes, equals=EXPECTED)
        jump(JUMPS[way])
        server.send(signal.SIGTERM)
        code, _ = await server.exit_code(PATIENCE)
    assert code == 0
