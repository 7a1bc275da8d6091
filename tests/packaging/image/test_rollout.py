"""Two rendered workers behind the real gateway, restarted in turn under load as a Deployment does it: no call fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.contract.gateway.smg import needs_smg
from tests.contract.gateway.smg_door import SmgDoor, needs_openai
from tests.packaging.image.conftest import Played
from tests.packaging.image.worker import PlayedWorker
from tests.support.fakes.fleet import Load

pytestmark = [pytest.mark.soak, needs_smg, needs_openai]

ROUNDS, CLIENTS = 2, 4
# What `docs/how-to/rollouts.md` says for smg; the chart's own default of the linger is longer.
VALUES = {"drain": {"lingerSeconds": int(SmgDoor.linger)}, "rollout": {"minReadySeconds": int(SmgDoor.min_ready)}}


async def replace(worker: PlayedWorker) -> int:
    """Drain the pod and start the next one in its place; the exit code of the first."""
    code = await asyncio.to_thread(worker.stop)
    await asyncio.to_thread(worker.remove)
    await asyncio.to_thread(worker.start)
    await asyncio.sleep(worker.deployment["spec"]["minReadySeconds"])
    return code


@pytest.mark.timeout(600)
async def test_no_call_fails_while_pods_are_replaced(played: Played, tmp_path: Path) -> None:
    workers = [played(VALUES) for _ in range(2)]
    for worker in workers:
        await asyncio.to_thread(worker.start)
    door = SmgDoor(workers, tmp_path)
    codes = []
    try:
        await door.settle()
        load = Load(door, CLIENTS)
        try:
            await load.more(CLIENTS)
            for worker in workers * ROUNDS:
                codes.append(await replace(worker))
                await load.more(CLIENTS)
        finally:
            await load.stop()
    finally:
        await door.close()
    print(f"{load.seen['whole']} whole calls, first token after {load.slowest:.2f} s at most")
    assert codes == [0] * (2 * ROUNDS)
    assert {what: number for what, number in load.seen.items() if what != "whole"} == {}
    assert load.seen["whole"] > CLIENTS * 2 * ROUNDS
