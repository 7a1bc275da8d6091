"""Ids that are none: refused before they can reach a batch, while a stream in that batch goes on unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from service.client import CallFailed, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.security import replies
from tests.security.neighbour import beside
from tests.support.checkpoints import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, make_checkpoint
from tests.support.scorecard import Scorecard
from tests.support.servers import serve_checkpoint

PADDED = 384
"""Rows of an embedding that is larger than its vocabulary, as many are."""

BAD = (-(2**31), -2, -1, VOCAB_SIZE, VOCAB_SIZE + 1, PADDED - 1, PADDED, 2**16, 2**31 - 1)
SPECIAL = (PAD_ID, BOS_ID, EOS_ID, VOCAB_SIZE - 1)


async def failure(client: SlipstreamClient, message: pb.GenerateRequest) -> CallFailed | None:
    """How a request ends: None if it was served to its end."""
    try:
        _ = [event async for event in client.stub.Generate(message)]
    except grpc.aio.AioRpcError as error:
        return replies.read(error)
    return None


def prompt(token: int, place: int, length: int) -> pb.GenerateRequest:
    """A prompt of `length` ids with `token` at `place`."""
    ids = [5] * length
    ids[place] = token
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling_params=pb.SamplingParams(max_tokens=2))


async def test_bad_ids_are_refused_and_the_batch_beside_them_is_unchanged(tiny: Path, scorecard: Scorecard) -> None:
    cases = 0
    async with serve_checkpoint(tiny) as (_, client), beside(client) as neighbour:
        for token in BAD:
            for place, length in ((0, 1), (0, 40), (17, 40), (39, 40), (999, 1000)):
                failed = await failure(client, prompt(token, place, length))
                assert failed is not None and failed.code is grpc.StatusCode.INVALID_ARGUMENT, (token, place)
                assert list(failed.fields) == [f"token_ids.ids[{place}]"]
                cases += 1
        for token in SPECIAL:
            for length in (1, 2, 40):
                assert await failure(client, prompt(token, 0, length)) is None, (token, length)
                cases += 1
        assert await failure(client, pb.GenerateRequest(text="<|pad|><|bos|><|eos|>" * 9)) is None
    scorecard(29, "ids at their edges", cases, at_least=50)
    scorecard(29, "answers beside them, all identical", neighbour.answers, at_least=1)


async def test_rows_of_the_embedding_without_a_token_do_not_harm(tmp_path: Path) -> None:
    """The model's vocabulary is what bounds an id; one that only the tokenizer lacks is served and has no text."""
    padded = make_checkpoint("llama", tmp_path, vocab_size=PADDED)
    async with serve_checkpoint(padded) as (_, client), beside(client):
        for token in (VOCAB_SIZE - 1, VOCAB_SIZE, PADDED - 1):
            assert await failure(client, prompt(token, 3, 20)) is None
            await client.detokenize([5, token, 5])
        for token in (PADDED, PADDED + 1, -1):
            failed = await failure(client, prompt(token, 3, 20))
            assert failed is not None and failed.code is grpc.StatusCode.INVALID_ARGUMENT


OPTIONS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    "logprobs": {"logprobs": True, "top_logprobs": 64},
    "bias": {"logit_bias": {0: -100.0, VOCAB_SIZE - 1: 100.0}},
    "filters": {"top_k": 3, "top_p": 0.5, "min_p": 0.2},
    "stops": {"stop": ["a", "b"], "stop_token_ids": [7], "include_stop_in_output": True},
    "samples": {"n": 5},
    "at least": {"min_tokens": 20},
    "greedy": {"temperature": 0.0},
}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no overlap": {"overlap": False},
    "no prefix cache": {"prefix_cache": "none"},
    "small chunks": {"chunked_prefill_size": 16},
    "pages of one": {"page_size": 1},
    "preemption": {"max_total_tokens": 320},
}


@pytest.mark.parametrize("feature", FEATURES)
async def test_no_pair_of_options_and_features_kills_the_engine(tiny: Path, feature: str) -> None:
    """Every pair of option groups at once, under each feature; all of them share their batches."""
    async with serve_checkpoint(tiny, **FEATURES[feature]) as (server, client):

        async def ask(first: str, second: str) -> None:
            params = {"max_tokens": 24, **OPTIONS[first], **OPTIONS[second]}
            outputs = await client.complete("the quick brown fox jumps over", **params)
            assert len(outputs) == params.get("n", 1)

        async with asyncio.TaskGroup() as asked:
            for first in OPTIONS:
                for second in OPTIONS:
                    asked.create_task(ask(first, second))
        assert server.engine.live_requests == 0
