"""A tokenizer that fails, as clients of a whole server meet it: one process, and a front end before the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from core.engine.api import EngineState
from core.engine.async_engine import AsyncEngine
from core.text.tokenizer import Tokenizer
from service.bench.emulated import expected_output
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.frontends.group import FrontEndGroup
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.server.server import Server
from tests.support.fakes.brittle_tokenizer import SECRET, BrittleTokenizer, panic
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.kept_server import GREEDY
from tests.support.servers import loaded
from tests.support.until import until
from tests.unit.core.engine.test_text_failures import OTHERS, PROMPT, TOKENS, bad_token

Call = Callable[[SlipstreamClient], Awaitable[Any]]


async def generated(client: SlipstreamClient, **options: Any) -> None:
    await client.complete(list(PROMPT), max_tokens=2000, **GREEDY, **options)


CALLS: dict[str, Call] = {
    "read": generated,
    "stop string": lambda client: generated(client, stop=["never said"]),
    "siblings": lambda client: generated(client, n=3),
    "kept": lambda client: generated(client, resumable=True, request_id="kept"),
    "tokenize": lambda client: client.tokenize(SECRET),
    "prompt": lambda client: client.complete(SECRET, max_tokens=2),
}


@pytest.mark.parametrize("frontends", [0, 1])
async def test_each_call_fails_alone_and_typed(
    frontends: int, checkpoint_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    whole = Tokenizer.load(checkpoint_of("llama"))
    bad = bad_token(whole.vocab_size)
    brittle = BrittleTokenizer(whole, [bad], panic)
    built = emulated_engine(brittle, step_seconds=0.002, rows=16, max_total_tokens=1 << 15)
    config = ServerConfig.of(port=0, metrics_port=0, drain_linger=0.0, frontends=frontends, resume_seconds=30.0)
    kind = FrontEndGroup if frontends else Server
    calls = CALLS | {"detokenize": lambda client: client.detokenize([5, bad])}
    async with loaded(kind(config, lambda *_: built)) as server:
        engine = cast(AsyncEngine, server.engine)
        async with SlipstreamClient(f"127.0.0.1:{server.port}") as client:
            for count, (name, call) in enumerate(calls.items(), 1):
                reading = [
                    asyncio.create_task(client.complete(list(other), max_tokens=TOKENS, **GREEDY)) for other in OTHERS
                ]
                with pytest.raises(CallFailed) as failed:
                    await call(client)
                assert (failed.value.code, failed.value.reason) == (grpc.StatusCode.INTERNAL, "TEXT_FAILED"), name
                assert SECRET not in str(failed.value)
                for other, task in zip(OTHERS, reading, strict=True):
                    (found,) = await task
                    assert list(found.token_ids) == expected_output(list(other), TOKENS, whole.vocab_size), name
                    assert found.text == whole.decode(found.token_ids, True)
                assert engine.stats.text_failures == count, name
            await abandoned(engine, client)
            with pytest.raises(CallFailed) as failed:
                _ = [event async for event in client.attach("left")]
            assert failed.value.reason == "TEXT_FAILED"
            await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))
            assert engine.state is EngineState.READY and engine.stats.text_failures == len(calls) + 1
    assert SECRET not in caplog.text
    assert len([each for each in caplog.records if each.levelno >= logging.ERROR]) == len(calls) + 1


async def abandoned(engine: AsyncEngine, client: SlipstreamClient) -> None:
    """A stream that is kept, and whose client is gone when its text fails, in the step that ends its output."""
    sampling = pb.SamplingParams(max_tokens=TOKENS, **GREEDY)
    asked = pb.GenerateRequest(
        request_id="left", token_ids=pb.TokenIds(ids=PROMPT), sampling_params=sampling, resumable=True
    )
    call = client.stub.Generate(asked)
    await call.read()
    call.cancel()
    await until(lambda: engine.live_requests == 0)
