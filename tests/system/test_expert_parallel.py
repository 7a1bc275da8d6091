"""A server whose engines share experts: streams from both, one engine that is killed, a drain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.process import PATIENCE, ServerProcess
from tests.support.checkpoints import make_checkpoint
from tests.system.test_replicas import SILENT, begun, engines, of_two_engines, outcomes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """With a model of experts."""
    model = make_checkpoint("qwen3_moe", tmp_path / "model", max_position_embeddings=4096)
    with of_two_engines(model=model, expert_parallel=True) as started:
        yield started


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
