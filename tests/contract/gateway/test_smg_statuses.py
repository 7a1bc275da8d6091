"""What OpenAI's clients see of our statuses: the gateway makes HTTP codes of them, and retries what is worth it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from core.errors import (
    AdapterNotFound,
    DeadlinePassed,
    Draining,
    EngineDead,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    RequestFailed,
)
from core.models.bundled import bundled_model_dir
from core.types.io import GenerateRequest
from service.errors import Unauthenticated
from tests.contract.gateway.smg import Smg, needs_smg
from tests.support.fakes.fake_engine import FakeEngine, count_up
from tests.support.servers import Serve

pytestmark = pytest.mark.tools

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

EXPECTED: list[tuple[Exception, int, int]] = [
    # what the engine raises, the HTTP code, how often it was asked
    (InvalidRequest.of("sampling_params.top_k", "must be between 0 and 7"), 400, 1),
    (AdapterNotFound("no adapter of this name is loaded"), 404, 1),
    (Unauthenticated("a valid bearer token is needed"), 401, 1),
    (RequestFailed("logits are not finite"), 500, 1),
    (RuntimeError("a bug"), 500, 1),
    (Overloaded("the waiting queue is full", reason="QUEUE_FULL"), 429, 2),
    (QueueTimeout("waited longer than queue_timeout; the server is busy"), 429, 2),
    (Draining("the server is shutting down"), 503, 2),
    (EngineDead("the engine failed; this server is going away"), 503, 2),
    (DeadlinePassed("the deadline passed before the output was complete"), 504, 2),
]


@needs_smg
async def test_statuses_arrive_as_the_right_codes(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = FakeEngine()
    asked: list[GenerateRequest] = []

    def script(request: GenerateRequest) -> Iterator[Any]:
        asked.append(request)
        if failing is None:
            yield from count_up(request)
        elif late:
            yield from list(count_up(request))[:2]
            yield failing
        else:
            yield failing

    engine.script = script
    failing, late = None, False
    async with serve(engine, model=str(bundled_model_dir())) as serving:
        smg = Smg(tmp_path_factory.mktemp("smg"), serving.target, cb_failure_threshold=1000)
        try:
            await asyncio.to_thread(smg.wait_ready)
            for failing, code, attempts in EXPECTED:
                asked.clear()
                status, body = await asyncio.to_thread(smg.post, "/v1/chat/completions", **CHAT)
                assert (status, len(asked)) == (code, attempts), (failing, body)
                told = "internal error" if isinstance(failing, RuntimeError) else str(failing)
                assert told in body["error"]["message"]
            late = True
            for failing in (RequestFailed("logits are not finite"), Draining("the server is shutting down")):
                asked.clear()
                events = await asyncio.to_thread(lambda: list(smg.events("/v1/chat/completions", **CHAT)))
                # Tokens went out: the code is 200, and nobody may repeat the request.
                assert str(failing) in events[-1]["error"]["message"] and len(asked) == 1
            failing = None
            status, body = await asyncio.to_thread(smg.post, "/v1/chat/completions", **CHAT)
            assert (status, body["usage"]["completion_tokens"]) == (200, 4)
        finally:
            smg.close()
    assert serving.engine.live_requests == 0
