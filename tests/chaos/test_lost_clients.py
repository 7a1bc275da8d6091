"""Clients that vanish without a word, as processes: killed, and frozen with their connection open."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.conftest import KEEPALIVE
from tests.chaos.process import PATIENCE, ServerProcess, settled
from tests.support.repository import ROOT
from tests.support.scorecard import Scorecard

pytestmark = pytest.mark.alone

TOKENS = 8000
"""More than can be made before either bound."""

KILLED_WITHIN = 1.0
"""The kernel closes the connection at once; the rest is one step, and the machine's other work."""


@asynccontextmanager
async def remote(server: ServerProcess) -> AsyncIterator[asyncio.subprocess.Process]:
    """A client process that has begun to read."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.remote_client", server.target, str(TOKENS)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            assert await process.stdout.readline() == b"reading\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize(
    ("number", "bound"),
    [(signal.SIGKILL, KILLED_WITHIN), (signal.SIGSTOP, 2 * KEEPALIVE + 1.0)],
    ids=["killed", "frozen"],
)
async def test_a_lost_client_gives_everything_back_in_bounded_time(
    shared: ServerProcess, number: signal.Signals, bound: float, scorecard: Scorecard
) -> None:
    async with remote(shared) as process:
        before = await shared.probe()
        assert before.running == 1 and before.used["kv_page"] > 0
        process.send_signal(number)
        began = time.monotonic()
        after, _ = await settled(shared, within=PATIENCE)
        seconds = time.monotonic() - began
    made = after.step - before.step
    print(f"{made} steps were spent on a dead client")
    scorecard(14, f"{number.name}: seconds to pages free", seconds, at_most=bound)
