"""A server that prefills and one that decodes on two networks, and the cable between them that is cut.

The server that prefills is in a network namespace of its own, as on another machine: what goes to it goes over a pair
of virtual cards, and is lost while one of them is down. All else is as in `test_disaggregation`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from tests.chaos.process import ServerProcess
from tests.contract.gateway.smg import needs_smg
from tests.contract.gateway.smg_pairs import transfers
from tests.proofs.equivalence.test_disaggregation import BY_NIXL
from tests.support.cables import Cable, Slow, laid, may_cut
from tests.system.paired_fleet import TRANSFER_TIMEOUT, server, settled
from tests.system.test_disaggregation import REMOTE_DECODE, asked, settings

__all__ = ["settings"]

REQUESTS, TOKENS = 120, 40

pytestmark = [
    pytest.mark.nightly,
    needs_smg,
    pytest.mark.skipif(not may_cut(), reason="networks are made by root, with iproute2"),
]


@pytest.fixture
def cable() -> Iterator[Cable]:
    with laid() as made:
        yield made


@dataclass(frozen=True)
class Pair:
    """Two servers, of which one is beyond the cable."""

    prefill: ServerProcess
    decode: ServerProcess

    async def answer(self, ids: list[int]) -> list[int]:
        """What a gateway gets that asks both; the second alone where the first cannot be reached."""
        keys = {}
        try:
            keys = {"kv_transfer_params_json": await self.prefilled(ids)}
        except grpc.aio.AioRpcError:
            pass
        return await self.decoded(ids, **keys)

    async def prefilled(self, ids: list[int]) -> str:
        """Where the keys are."""
        return str((await asked(self.prefill, ids, kv_transfer_params_json=REMOTE_DECODE)).kv_transfer_params_json)

    async def decoded(self, ids: list[int], **keys: str) -> list[int]:
        """Tokens of the server that decodes."""
        return list((await asked(self.decode, ids, TOKENS, **keys)).output_ids)


@contextmanager
def pair(cable: Cable, config: Path, way: str, folder: Path) -> Iterator[Pair]:
    (secret := folder / "secret").write_text("sixteen bytes or more")
    same = {"config": config, "transfer_engine": way, "transfer_secret_file": secret}
    there = dict.fromkeys(("host", "metrics_host", "transfer_host"), cable.there)
    beyond = server(role="prefill", within=cable.within, **same, **there)
    with closing(beyond), closing(server(role="decode", transfer_peers=f"{cable.there}/32", **same)) as decode:
        yield Pair(beyond.wait_ready(), decode.wait_ready())


def prompts(seed: int, count: int = REQUESTS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 700) for _ in range(rng.randint(100, 500))] for _ in range(count)]


WAYS = pytest.mark.parametrize("way", ["tcp", pytest.param("nixl", marks=BY_NIXL)])


@WAYS
async def test_keys_beyond_a_cut_are_computed_here(
    cable: Cable, settings: Path, way: str, tmp_path: Path, seed: int
) -> None:
    with pair(cable, settings, way, tmp_path) as servers:
        asks = prompts(seed, 8)
        keys = await asyncio.gather(*map(servers.prefilled, asks))
        cable.cut()
        together = zip(asks, keys, strict=True)
        found = await asyncio.gather(*(servers.decoded(ids, kv_transfer_params_json=each) for ids, each in together))
        assert (await transfers(servers.decode))["failures"] == len(asks)
        cable.mend()
        assert found == await asyncio.gather(*map(servers.decoded, asks))
        await settled([servers.prefill, servers.decode])


@WAYS
async def test_a_cable_that_is_cut_again_and_again_costs_time(
    cable: Cable, settings: Path, way: str, tmp_path: Path, seed: int
) -> None:
    """At any stage of any request: while it is asked, computed, waits for its keys, or gets them."""
    rng = random.Random(seed)

    async def cuts() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.2, 1.5))
            cable.cut()
            await asyncio.sleep(rng.choice([0.1, 0.4, TRANSFER_TIMEOUT + 0.5]))
            cable.mend()

    with pair(cable, settings, way, tmp_path) as servers:
        asks = prompts(seed)
        cutting = asyncio.create_task(cuts())
        found = list[list[int]]()
        for first in range(0, REQUESTS, 8):
            found += await asyncio.gather(*map(servers.answer, asks[first : first + 8]))
        cutting.cancel()
        await asyncio.wait([cutting])
        cable.mend()
        assert found == await asyncio.gather(*map(servers.decoded, asks))
        told = await transfers(servers.decode)
        assert cutting.cancelled() and told["taken_requests"] > 0, told
        await settled([servers.prefill, servers.decode])
        # All is as it was: keys go again.
        (fresh,) = prompts(seed + 1, 1)
        before = (await transfers(servers.decode))["taken_requests"]
        await servers.answer(fresh)
        assert (await transfers(servers.decode))["taken_requests"] == before + 1


@WAYS
async def test_a_cable_that_delays_reorders_and_loses_packets_costs_time(
    settings: Path, way: str, tmp_path: Path, seed: int
) -> None:
    """Every packet takes its own 5 to 40 ms, and one of 50 none at all: some keys come late, and some too late."""
    print(f"seed {seed}")
    asks = prompts(seed, 40)
    with laid(Slow(5, 40, 50, seed)) as cable, pair(cable, settings, way, tmp_path) as servers:
        began = time.monotonic()
        _, writer = await asyncio.open_connection(*servers.prefill.target.rsplit(":", 1))
        assert time.monotonic() - began >= 2 * 0.005, "there and back"
        writer.close()
        found = list[list[int]]()
        for first in range(0, len(asks), 8):
            found += await asyncio.gather(*map(servers.answer, asks[first : first + 8]))
        assert found == await asyncio.gather(*map(servers.decoded, asks))
        told = await transfers(servers.decode)
        assert told["taken_requests"] > 0, told
        await settled([servers.prefill, servers.decode])
