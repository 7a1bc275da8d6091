"""A client that falls behind gets what queued up as few large deltas, with every id, text and log probability once."""

from __future__ import annotations

import asyncio

import pytest

from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from service.bench.emulated import expected_output
from service.client import Chunk, End, SlipstreamClient
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.servers import serve_checkpoint
from tests.support.until import until

TOKENS = 800
PROMPT = [7, 11, 13]
SMALL_WINDOW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
)
"""A few kilobytes in flight: soon after the client stops to read, the server's write waits."""


async def _read(
    client: SlipstreamClient, caught_up: asyncio.Event, **sampling: object
) -> tuple[list[Chunk], list[End]]:
    """The first delta, then nothing until `caught_up`, then the rest without a pause."""
    chunks: list[Chunk] = []
    ends: list[End] = []
    options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    async for event in client.generate(PROMPT, **options):
        if isinstance(event, End):
            ends.append(event)
            continue
        chunks.append(event)
        await caught_up.wait()
    return chunks, ends


SAMPLING = {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [5, 9], "stop": ["never said"]}


@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["plain", "told"])
async def test_tokens_queued_for_a_slow_reader_leave_as_one_delta(sampling: dict[str, object]) -> None:
    tokenizer = Tokenizer.load(str(bundled_model_dir()))
    built = emulated_engine(tokenizer, step_seconds=0.0005, rows=4, max_total_tokens=16_384)
    async with serve_checkpoint(bundled_model_dir(), lambda *_: built, write_timeout=60.0) as (server, brisk):
        engine = server.engine
        prompt_reader = asyncio.Event()
        prompt_reader.set()
        brisk_chunks, _ = await _read(brisk, prompt_reader, **sampling)
        caught_up = asyncio.Event()
        async with SlipstreamClient(f"127.0.0.1:{server.port}", SMALL_WINDOW) as client:
            reading = asyncio.create_task(_read(client, caught_up, **sampling))
            await until(lambda: engine.stats.running == 1, within=20)
            await until(lambda: not engine.live_requests, within=60)
            assert not reading.done()
            caught_up.set()
            chunks, ends = await reading
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == expected_output(PROMPT, TOKENS, tokenizer.vocab_size)
    positions = [place for chunk in chunks for place in range(chunk.position, chunk.position + len(chunk.token_ids))]
    assert positions == list(range(TOKENS)), "each place once, in order"
    assert [(end.reason, end.completion_tokens) for end in ends] == [("length", TOKENS)]
    assert "".join(chunk.text for chunk in chunks) == "".join(chunk.text for chunk in brisk_chunks)
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs]
    assert logprobs == [entry for chunk in brisk_chunks for entry in chunk.logprobs]
    assert [entry[0] for entry in logprobs] == (ids if sampling else [])
    told = [values for chunk in chunks for values in chunk.chosen_logprobs]
    assert told == [values for chunk in brisk_chunks for values in chunk.chosen_logprobs]
    assert [len(values) for values in told] == ([2] * TOKENS if sampling else [])
    # What was in flight when the reader stopped is as it was; all the rest, most of the output, came at once.
    assert max(len(chunk.token_ids) for chunk in chunks) > TOKENS // 3
    assert len(chunks) < TOKENS // 2
