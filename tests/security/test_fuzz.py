"""Ten thousand requests from a fuzzer: documented codes only, clean texts only, and the server is as well as before."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from service.client import SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.server.server import Server
from tests.security import replies
from tests.security.judge_edges import LABEL_TOKENS
from tests.security.neighbour import ASKED, PROMPT
from tests.security.wire import Fuzzer
from tests.support.log_lines import LogLines
from tests.support.scorecard import Scorecard
from tests.support.servers import serve_checkpoint
from tests.support.until import until

pytestmark = pytest.mark.alone

REQUESTS = 10_000
AT_ONCE = 32
SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]

WEIGHTS = {"Generate": 45, "Embed": 8, "Classify": 8, "Score": 8, "Tokenize": 8, "Detokenize": 8, "Abort": 8}
"""Out of a hundred; the rest goes to the calls that take nothing."""


async def test_ten_thousand_fuzzed_requests(tiny: Path, seed: int, scorecard: Scorecard, logged: LogLines) -> None:
    print(f"fuzz seed {seed}")
    settings = {"max_running_requests": 64, "resume_seconds": 0.2, "label_tokens": LABEL_TOKENS}
    async with serve_checkpoint(tiny, **settings) as (server, client):
        alone = await client.complete(PROMPT, **ASKED)
        before = time.monotonic()
        codes = await attack(client, Fuzzer(seed))
        seconds = time.monotonic() - before
        after = await client.complete(PROMPT, **ASKED)
        assert [each.token_ids for each in after] == [each.token_ids for each in alone]
        await all_given_back(server)
    print(f"{dict(codes)} in {seconds:.1f} s")
    assert sum(codes.values()) == REQUESTS
    # Both paths must be taken often, or the fuzzer only ever knocks at a closed door.
    assert codes["OK"] > REQUESTS // 10 and codes["INVALID_ARGUMENT"] > REQUESTS // 10
    assert "incident" not in logged.text and "Traceback" not in logged.text
    bad = [codes["UNKNOWN"], codes["INTERNAL"]]
    scorecard(28, f"of {REQUESTS} fuzzed requests (seed {seed}), UNKNOWN and INTERNAL", bad, equals=[0, 0])
    scorecard(31, "texts checked, each of them clean", len(replies.SEEN), at_least=REQUESTS // 10)


async def attack(client: SlipstreamClient, fuzzer: Fuzzer) -> Counter[str]:
    """Codes of all requests."""
    codes: Counter[str] = Counter()
    names = [method.name for method in SERVICE.methods]
    weights = [WEIGHTS.get(name, 10 / (len(names) - len(WEIGHTS))) for name in names]
    left = REQUESTS

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            method = SERVICE.methods_by_name[fuzzer.random.choices(names, weights)[0]]
            raw = fuzzer.request(getattr(pb, method.input_type.name))
            path = f"/{SERVICE.full_name}/{method.name}"
            codes[await code_of(client.channel, path, method.server_streaming, raw)] += 1

    async with asyncio.TaskGroup() as workers:
        for _ in range(AT_ONCE):
            workers.create_task(worker())
    return codes


async def code_of(channel: grpc.aio.Channel, path: str, streams: bool, raw: bytes) -> str:
    """The code that a request ends with; a stream is left after its third event."""
    try:
        if not streams:
            await channel.unary_unary(path)(raw, timeout=30)
            return "OK"
        stream: Any = channel.unary_stream(path)(raw, timeout=30)
        try:
            for _ in range(3):
                if await stream.read() is grpc.aio.EOF:
                    break
        finally:
            stream.cancel()
    except grpc.aio.AioRpcError as error:
        return replies.read(error).code.name
    return "OK"


async def all_given_back(server: Server) -> None:
    """Rows and pages of everything that was cancelled on the way."""
    await until(lambda: not any(pool.used for pool in server.engine.stats.pools) and not server.engine.live_requests)
