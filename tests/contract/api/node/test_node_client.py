"""Node's `@grpc/grpc-js` streams, cancels, embeds and hits a deadline against this server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from core.errors import Overloaded, QueueTimeout
from service.client import SERVICE_CONFIG
from tests.contract.api.test_cancellation import closed
from tests.contract.api.test_client import Flaky
from tests.support import tools
from tests.support.fakes.fake_engine import FakeEngine, held, token_at
from tests.support.repository import ROOT
from tests.support.servers import Serve
from tests.support.until import PATIENCE

PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
CLIENT = Path(__file__).with_name("client.mjs")

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(shutil.which("node") is None or shutil.which("npm") is None, reason="Node.js is not installed"),
]


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The packages; skips where the registry is out of reach."""
    return tools.node_modules(*PACKAGES)


async def run(modules: Path, target: str, scenario: str) -> dict[str, Any]:
    """Run the client; what it printed."""
    process = await asyncio.create_subprocess_exec(
        *("node", str(CLIENT), target, str(ROOT / "protos"), scenario),
        env=os.environ | {"NODE_MODULES": str(modules), "SERVICE_CONFIG": json.dumps(SERVICE_CONFIG)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    result: dict[str, Any] = json.loads(out)
    return result


async def test_streams(serve: Serve, node_modules: Path) -> None:
    async with serve() as serving:
        result = await run(node_modules, serving.target, "stream")
    assert result["code"] == 0
    assert result["kinds"] == ["started", *["delta"] * 5, "finished"]
    assert result["ids"] == [token_at(at) for at in range(5)]
    assert result["positions"] == list(range(5))
    assert "".join(result["texts"]) == "0 1 2 3 4 "
    assert result["finished"]["reason"] == "FINISH_REASON_LENGTH"
    assert result["finished"]["usage"]["completion_tokens"] == 5


async def test_comes_back_when_the_server_says_when(serve: Serve, node_modules: Path) -> None:
    engine = Flaky(Overloaded("full", reason="QUEUE_FULL", retry_after=0.01), failures=1)
    async with serve(engine) as serving:
        result = await run(node_modules, serving.target, "stream")
    assert (result["code"], engine.asked) == (0, 2)
    assert result["ids"] == [token_at(at) for at in range(5)]


async def test_does_not_where_the_server_says_no(serve: Serve, node_modules: Path) -> None:
    engine = Flaky(QueueTimeout("waited"), failures=9)
    async with serve(engine) as serving:
        result = await run(node_modules, serving.target, "stream")
    assert (result["code"], engine.asked) == (8, 1)


async def test_cancels(serve: Serve, node_modules: Path) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=1))) as serving:
        result = await run(node_modules, serving.target, "cancel")
        await closed(serving.engine)
        assert await serving.server.tracker.wait_idle(PATIENCE)
    assert result["code"] == 1
    assert result["kinds"] == ["started", "delta"]


async def test_hits_a_deadline(serve: Serve, node_modules: Path) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=1))) as serving:
        result = await run(node_modules, serving.target, "deadline")
        await closed(serving.engine)
        assert serving.engine.streams[0].request.deadline is not None
    assert result["code"] == 4


async def test_embeds(serve: Serve, node_modules: Path) -> None:
    async with serve() as serving:
        result = await run(node_modules, serving.target, "embed")
    assert (result["code"], result["response"]["dimension"]) == (0, 4)
    vectors = result["response"]["embeddings"]
    assert [vector["values"] for vector in vectors] == [[5, 0, 0, 0], [2, 1, 0, 0]]
    assert [vector["usage"]["prompt_tokens"] for vector in vectors] == [5, 2]
