"""A request that kills the worker which serves it, sent to a fleet by a client that retries as published."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from service.client import CallFailed, SlipstreamClient
from tests.chaos.device import Faults, expected
from tests.chaos.process import ServerProcess
from tests.support.scorecard import Scorecard

WORKERS = 3
DEADLY = 200
PROMPT = [5, 6, 7]


@pytest.fixture
def workers(death: str) -> Iterator[list[ServerProcess]]:
    """All begun before the first is waited for."""
    started = [ServerProcess(Faults(deadly_token=DEADLY, death=death)) for _ in range(WORKERS)]
    try:
        yield [worker.wait_ready() for worker in started]
    finally:
        for worker in started:
            worker.close()


@pytest.mark.parametrize(("death", "most"), [("raise", 1), ("kill", 2)])
async def test_a_query_of_death_does_not_take_the_fleet(
    workers: list[ServerProcess], scorecard: Scorecard, death: str, most: int
) -> None:
    """Where the engine fails, the server still says that a retry is no use; a process that is gone says nothing."""
    target = "ipv4:" + ",".join(worker.target for worker in workers)
    async with SlipstreamClient(target, fleet=True) as client:
        vocab = (await client.model_info()).vocab_size
        with pytest.raises(CallFailed) as failed:
            await client.complete([*PROMPT, DEADLY], max_tokens=4, temperature=0.0)
        assert failed.value.code is grpc.StatusCode.UNAVAILABLE
        lost = [await _is_lost(worker) for worker in workers].count(True)
        scorecard(39, f"a request that ends a worker by {death}: workers lost", lost, at_most=most)
        assert lost >= 1, "otherwise nothing was tried"
        for _ in range(2 * WORKERS):
            [completion] = await client.complete(PROMPT, max_tokens=4, temperature=0.0)
            assert list(completion.token_ids) == expected(PROMPT, 4, vocab)


async def _is_lost(worker: ServerProcess) -> bool:
    async with worker.client(enable_retries=0) as alone:
        try:
            await alone.complete(PROMPT, max_tokens=1)
        except CallFailed:
            return True
    return False
