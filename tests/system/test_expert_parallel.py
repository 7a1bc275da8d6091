"""A server whose engines share experts: streams from both, one engine that is killed, a drain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.process import PATIENCE, ServerProcess
from tests.support.checkpoints import make_checkpoint
from tests.system.test_replicas import SILENT, begun, engines, outcomes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """The real one."""
    made = ServerProcess(
        *(None, "service"),
        model=make_checkpoint("qwen3_moe", tmp_path / "model", max_position_embeddings=4096),
        data_parallel=2,
        expert_parallel=True,
        drain_grace=20,
    )
    children: list[psutil.Process] = []
    try:
        made.wait_ready()
        children = engines(made)
        yield made
    finally:
        if made.process.poll() is None:
            children = engines(made)
        made.close()
        _, left = psutil.wait_procs(children, timeout=PATIENCE)
        assert not left, "engines outlived their server"


async def test_all_engines_end_with_one_and_serve_again(server: ServerProcess) -> None:
    async with server.client() as client:
        tasks = [await begun(client, place) for place in range(4)]
        before = engines(server)
        before[0].kill()
        assert await outcomes(tasks) == ["UNAVAILABLE ENGINE_DEAD"] * 4

        async def serve() -> bool:
            metrics = await server.metrics()
            ready = [metrics[f'slipstream_replica_ready{{replica="{name}"}}'] for name in "01"]
            return ready == [1.0, 1.0] and not {each.pid for each in before} & {each.pid for each in engines(server)}

        async with asyncio.timeout(SILENT):
            while not await serve():
                await asyncio.sleep(0.1)
        tasks = [await begun(client, place, 60 + place) for place in range(4)]
        server.process.send_signal(signal.SIGTERM)
        assert await outcomes(tasks) == [60, 61, 62, 63]
        assert await asyncio.to_thread(server.process.wait, PATIENCE) == 0
