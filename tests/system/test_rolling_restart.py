"""Two real workers, restarted one after the other under load: no client sees a failure before its first token.

`-m soak` restarts both five times; the ordinary suite does it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.fakes.fleet import FrontDoor, GrpcDoor, Load, Worker, fleet
from tests.scorecard import Scorecard

CLIENTS = 6
DOORS: dict[str, Callable[[Sequence[Worker]], FrontDoor]] = {"grpc": GrpcDoor}


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("flags", [(), ("--frontends=2",)], ids=["one process", "front ends"])
async def test_no_failure_before_the_first_token(
    door: str, rounds: int, flags: tuple[str, ...], scorecard: Scorecard
) -> None:
    if rounds == 1 and flags:
        pytest.skip("front ends are restarted by the soak; their drain is in tests/system/test_frontends.py")
    async with fleet(2, *flags) as workers:
        front = DOORS[door](workers)
        load = Load(front, CLIENTS)
        await load.more(CLIENTS)
        codes = []
        for _ in range(rounds):
            for worker in workers:
                codes.append(await worker.restart())
                await load.more(CLIENTS)
        await load.stop()
        await front.close()
    failures = {what: count for what, count in load.seen.items() if what != "whole"}
    print(f"{load.seen['whole']} whole calls, first token after {load.slowest:.2f} s at most, failures {failures}")
    scorecard(38, f"{rounds} x 2 restarts: calls, failures", f"{load.seen['whole']}, {failures or 0}")
    assert not failures
    assert codes == [0] * (2 * rounds)
