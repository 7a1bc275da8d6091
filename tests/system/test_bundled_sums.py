"""The bundled model, asked through gRPC: its answers can be judged."""

from __future__ import annotations

import asyncio

from core.models.bundled import bundled_model_dir
from core.models.bundled.corpus import held_out_sums
from service.client import SlipstreamClient
from tests.support.servers import serve_checkpoint

ASKED, EXPECTED = 100, 95


async def _answer(client: SlipstreamClient, a: int, b: int) -> bool:
    (answer,) = await client.complete(f"{a}+{b}=", temperature=0.0, max_tokens=8)
    return answer.text.strip() == str(a + b) and answer.end.reason == "stop"


async def test_a_hundred_sums_that_it_never_saw() -> None:
    sums = held_out_sums()[:ASKED]
    async with serve_checkpoint(bundled_model_dir()) as (_, client):
        right = sum(await asyncio.gather(*(_answer(client, a, b) for a, b in sums)))
        chat = await client.complete([{"role": "user", "content": f"{sums[0][0]}+{sums[0][1]}="}], temperature=0.0)
    print(f"{right} of {len(sums)} held-out sums are right")
    assert len(sums) == ASKED and right >= EXPECTED
    assert chat[0].text.strip() == str(sum(sums[0]))
