"""Two real workers, restarted one after the other under load: no client sees a failure before its first token.

`-m soak` restarts both five times, behind a gRPC client and behind a real gateway, with front ends and with several
engines; the ordinary suite does it once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.contract.gateway.smg import needs_smg
from tests.contract.gateway.smg_door import SmgDoor, needs_openai
from tests.support.fakes.fleet import GrpcDoor, Load, fleet
from tests.support.scorecard import Scorecard

Door = type[GrpcDoor] | type[SmgDoor]
FRONT_ENDS = ("--frontends=2",)
ENGINES = ("--data-parallel=2", "--cpu-threads=1")


async def rolling_restart(
    door: Door, flags: tuple[str, ...], rounds: int, load: tuple[int, float], folder: Path
) -> Load:
    """Restart two workers in turn, `rounds` times, under the `load` of so many clients and their pause in seconds."""
    async with fleet(door.linger, *flags) as workers:
        front = door(workers, folder)
        await front.settle()
        clients = Load(front, *load)
        codes = []
        try:
            await clients.more(load[0])
            for worker in workers * rounds:
                codes.append(await worker.restart())
                # As a Deployment does with minReadySeconds.
                await asyncio.sleep(door.min_ready)
                await clients.more(load[0])
        finally:
            await clients.stop()
            await front.close()
    assert codes == [0] * (2 * rounds)
    return clients


def check(load: Load, rounds: int, scorecard: Scorecard) -> None:
    """Every call was whole."""
    failures = {what: count for what, count in load.seen.items() if what != "whole"}
    print(f"{load.seen['whole']} whole calls, first token after {load.slowest:.2f} s at most, failures {failures}")
    scorecard(38, f"{rounds} x 2 restarts: calls that were whole", load.seen["whole"])
    scorecard(38, f"{rounds} x 2 restarts: calls that were not", failures, equals={})


@pytest.mark.timeout(300)
async def test_no_call_fails_in_a_rolling_restart(tmp_path: Path, scorecard: Scorecard) -> None:
    check(await rolling_restart(GrpcDoor, (), 1, (2, 0.1), tmp_path), 1, scorecard)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("door", "flags"),
    [
        pytest.param(GrpcDoor, (), id="grpc"),
        pytest.param(GrpcDoor, FRONT_ENDS, id="grpc-frontends"),
        pytest.param(GrpcDoor, ENGINES, id="grpc-engines"),
        pytest.param(SmgDoor, ENGINES, id="smg-engines", marks=(needs_smg, needs_openai)),
        pytest.param(SmgDoor, (), id="smg", marks=(needs_smg, needs_openai)),
        pytest.param(SmgDoor, FRONT_ENDS, id="smg-frontends", marks=(needs_smg, needs_openai)),
    ],
)
async def test_no_call_fails_in_five(door: Door, flags: tuple[str, ...], tmp_path: Path, scorecard: Scorecard) -> None:
    check(await rolling_restart(door, flags, 5, (6, 0.0), tmp_path), 5, scorecard)
