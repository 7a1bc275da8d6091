"""Embeddings that are read, left, aborted and late beside streams: what arrives is right, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from service.client import CallFailed, SlipstreamClient, Vector
from tests.chaos.device import vector_of
from tests.chaos.history import FULL, Verdict
from tests.chaos.process import ServerProcess, settled
from tests.chaos.readers import ask, endings, read, verdict

pytestmark = pytest.mark.alone

STREAMS, CALLS = 20, 120
LATENCIES = "slipstream_embedding_latency_seconds_count"
FINISHED = 'slipstream_requests_finished_total{reason="%s"}'


@dataclass
class Call:
    """One Embed call, how its client behaves, and what came of it."""

    prompts: list[list[int]]
    pooling: str
    manner: str
    patience: float
    name: str
    vectors: list[Vector] = field(default_factory=list)
    ending: str = ""

    @property
    def right(self) -> bool:
        """Whether the vectors are those of the prompts, in order."""
        found = [vector.values for vector in self.vectors]
        return found == [vector_of(prompt, self.pooling) for prompt in self.prompts]


def draw(vocab: int, rng: random.Random) -> Call:
    """A call of a few inputs, short and long; of many long ones if it is to be aborted while it runs."""
    manner = rng.choice(("patient", "patient", "leaves", "aborts", "late"))
    lengths = [int(1500 ** rng.random()) for _ in range(rng.choice((1, 1, 2, 5, 16)))]
    if manner == "aborts":
        lengths = [1500] * 20
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    name = f"e{rng.getrandbits(64):016x}"
    return Call(prompts, rng.choice(("last", "mean", "cls")), manner, rng.expovariate(20), name)


async def make(client: SlipstreamClient, call: Call) -> None:
    """Run the call to whatever end its manner gives it."""
    timeout = call.patience if call.manner == "late" else None
    asked = asyncio.create_task(
        client.embed(*call.prompts, pooling=call.pooling, normalize=False, request_id=call.name, timeout=timeout)
    )
    if call.manner in ("leaves", "aborts"):
        await asyncio.wait((asked,), timeout=call.patience)
        if call.manner == "leaves":
            asked.cancel()
        else:
            # Not found until it was admitted: whoever wants it gone asks again.
            while not asked.done() and not await client.abort(call.name):
                await asyncio.sleep(0.005)
    try:
        call.vectors = await asked
        call.ending = "vectors"
    except asyncio.CancelledError:
        call.ending = "left"
    except CallFailed as failed:
        call.ending = failed.reason or failed.code.name


ALLOWED = {
    "patient": {"vectors"},
    "leaves": {"vectors", "left"},
    "aborts": {"vectors", "REQUEST_ABORTED"},
    "late": {"vectors", "DEADLINE_EXCEEDED"},
}


async def test_vectors_beside_streams_in_a_storm(shared: ServerProcess, seed: int) -> None:
    rng = random.Random(seed + 40)
    await settled(shared)
    before = await shared.metrics()
    async with shared.client() as client:
        vocab = (await client.model_info()).vocab_size
        calls = [draw(vocab, rng) for _ in range(CALLS)]
        streams = [ask(vocab, rng.randint(50, 300), rng) for _ in range(STREAMS)]
        await asyncio.gather(
            *(make(client, call) for call in calls),
            *(read(client, stream) for stream in streams),
        )
        await settled(shared)
    after = await shared.metrics()
    print(seed, Counter((call.manner, call.ending) for call in calls))
    assert verdict(streams, vocab) == Verdict() and endings(streams) == {FULL: STREAMS}
    assert [call for call in calls if call.ending not in ALLOWED[call.manner]] == []
    whole = [call for call in calls if call.ending == "vectors"]
    assert [call.name for call in whole if not call.right] == []
    assert {call.ending for call in calls} >= {"vectors", "left", "REQUEST_ABORTED", "DEADLINE_EXCEEDED"}
    grown = {name: after[name] - before[name] for name in (LATENCIES, FINISHED % "stop", FINISHED % "length")}
    # Inputs of a call that ended early may have had their vector.
    assert grown[LATENCIES] == grown[FINISHED % "stop"] >= sum(len(call.prompts) for call in whole)
    assert grown[FINISHED % "length"] == STREAMS
