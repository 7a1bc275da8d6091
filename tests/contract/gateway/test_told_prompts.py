"""Log probabilities of long prompts in both dialects: all of them in one message, as long as clients take it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from core.types.io import Delta, Finished, FinishReason, GenerateRequest, ModelInfo, OutputEvent, Timing, TokenLogprob
from core.types.io import Usage as TokenUsage
from core.types.sampling_params import MAX_PROMPT_LOGPROBS
from tests.contract.gateway.spoken import Spoken
from tests.support.fakes.fake_engine import FakeEngine, info_with
from tests.support.fakes.granted import granted
from tests.support.servers import Serve

VOCAB, LONGEST = 1 << 18, 400_000
INFO: ModelInfo = info_with(vocab_size=VOCAB, max_input_length=LONGEST, context_length=LONGEST + 8)
PART = 4096


def telling(request: GenerateRequest) -> Iterator[OutputEvent]:
    """The largest ids there are, in parts."""
    top = request.sampling.prompt_logprobs
    assert top is not None and request.token_ids is not None
    count = len(request.token_ids) - 1
    entry = TokenLogprob(VOCAB - 1, -1.5, ((VOCAB - 1, -0.5),) * top)
    for first in range(0, count, PART):
        here = min(PART, count - first)
        yield Delta(0, first - count, (VOCAB - 1,) * here, "", (entry,) * here)
    yield Delta(0, 0, (40,), "")
    yield Finished(0, FinishReason.LENGTH, TokenUsage(count + 1, 0, 1), Timing(0.0, 0.0, 0.0), None)


def asking(spoken: Spoken, count: int, top: int) -> Any:
    """A request that is told of `count` tokens."""
    if spoken.name == "vllm":
        return spoken.generate([VOCAB - 1] * count, params={"prompt_logprobs": top}, stream=True)
    fields: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": 1}
    return spoken.generate([VOCAB - 1] * (count + 1), stream=True, **fields)


@pytest.mark.parametrize("top", [0, 1, MAX_PROMPT_LOGPROBS])
async def test_the_longest_that_is_told_is_one_that_a_client_takes(serve: Serve, spoken: Spoken, top: int) -> None:
    """By gRPC's default for what a client receives."""
    engine = FakeEngine(telling, INFO)
    async with serve(engine, max_receive_bytes=16 << 20) as serving:
        stub = spoken.stub(serving.client.channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(asking(spoken, LONGEST - 1, top)).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and not engine.streams
        field = "sampling_params.prompt_logprobs" if spoken.name == "vllm" else "logprob_start_len"
        told = re.search(r"at most (\d+) fit into a message", refused.value.details() or "")
        assert told is not None and field in (refused.value.details() or "")
        most = int(told[1])
        with pytest.raises(grpc.aio.AioRpcError, match=f"tells of {most + 1} tokens with {top} alternatives each"):
            await stub.Generate(asking(spoken, most + 1, top)).read()
        call = stub.Generate(asking(spoken, most, top))
        sizes = []
        with granted("a client takes it"):
            responses = [response async for response in call]
        for response in responses:
            part = getattr(response, response.WhichOneof("response"))
            if part.HasField("input_logprobs"):
                assert len(part.input_logprobs.token_ids) == most
                sizes.append(response.ByteSize())
    assert len(sizes) == 2 and 3 << 20 < max(sizes) <= 4 << 20, sizes


@pytest.mark.parametrize("top", [-(1 << 31), -3, MAX_PROMPT_LOGPROBS + 1, (1 << 31) - 1])
async def test_what_cannot_be_asked_for_is_refused_as_that(serve: Serve, spoken: Spoken, top: int) -> None:
    async with serve(FakeEngine(telling, INFO)) as serving:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await spoken.stub(serving.client.channel).Generate(asking(spoken, 9, top)).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "fit into a message" not in (refused.value.details() or "")
