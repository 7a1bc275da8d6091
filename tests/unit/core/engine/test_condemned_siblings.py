"""Where one output of a prompt fails for its numbers, what the others computed of that prompt is not trusted either."""

from __future__ import annotations

import asyncio

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.errors import RequestFailed
from core.text.tokenizer import Tokenizer
from service.bench.emulated import expected_output
from tests.support.until import until
from tests.unit.core.engine.emulation import HookedModel, ask, last, read, running

PROMPT = tuple(3 + place % 40 for place in range(60))
DOOMED = 50


def cached_pages(engine: object) -> int:
    pools = {pool.name: pool for pool in engine.stats.pools}  # type: ignore[attr-defined]
    return int(pools["kv_page"].cached)


@pytest.mark.parametrize("n", [1, 2, 4])
async def test_outputs_in_the_middle_of_a_condemned_prompt_leave_nothing(tokenizer: Tokenizer, n: int) -> None:
    """One chunk a step: with the first output at its end, the last of four has not begun with the second half."""
    model = HookedModel(tokenizer)

    def spoil(step: int, logits: torch.Tensor, batch: ForwardBatch) -> None:
        logits[batch.input_ids[batch.last_indices] == DOOMED] = float("nan")

    async with running(tokenizer, model, page_size=4, chunked_prefill_size=8) as engine:
        await read(engine, ask((9, 9, 9), tokens=2))
        await until(lambda: engine.live_requests == 0)
        sound = cached_pages(engine)
        model.hook = spoil
        stream = await engine.generate(ask((*PROMPT, DOOMED), tokens=200, n=n))
        with pytest.raises(RequestFailed):
            await asyncio.wait_for(last(stream), 10)
        neighbour = await read(engine, ask((7, 7), tokens=4))
        assert neighbour[0] == expected_output([7, 7], 4, tokenizer.vocab_size)
        await until(lambda: engine.live_requests == 0)
        assert cached_pages(engine) == sound + 1, "of the neighbour, one page"
