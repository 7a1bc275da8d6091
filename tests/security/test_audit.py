"""What the audit log says of acts and of refused callers, how little of a flood, and nothing of tokens and prompts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from service.access.audit import Audit
from service.client import CallFailed, SlipstreamClient
from service.client.adapters import AdapterClient
from service.errors import Unauthenticated
from service.metrics.rpc import RpcMetrics
from service.process import audit_log
from service.process.audit_log import MOST_KEYS, MOST_LINES, QUIET_SECONDS, Floods
from service.rpc.interceptors import Context
from tests.support.servers import Serve

ALICE, BOB, WRONG = "alice-0123456789abcdef", "bobby-0123456789abcdef", "wrong-0123456789abcdef"
LOAD = "/slipstream.v1.AdapterService/LoadAdapter"


class Lines(logging.Handler):
    """What is written to the audit log, as it would be printed."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.texts.append(record.getMessage())

    def told(self) -> list[dict[str, Any]]:
        """Each line without what differs from run to run."""
        return [{k: v for k, v in json.loads(text).items() if k != "seconds"} for text in self.texts]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, log = Lines(), logging.getLogger("slipstream.audit")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    return str(path)


async def failing(call: Any) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        await call
    return failed.value


async def test_each_act_of_an_admin_and_each_refused_caller_is_a_line(serve: Serve, tokens: str, lines: Lines) -> None:
    async with serve(auth_token_file=tokens, admins="alice") as serving:
        async with (
            SlipstreamClient(serving.target, token=ALICE) as alice,
            SlipstreamClient(serving.target, token=BOB) as bob,
            SlipstreamClient(serving.target, token=WRONG) as stranger,
        ):
            await AdapterClient(alice).load("french\nforged", "fr/1")
            await failing(AdapterClient(alice).unload("german"))
            await failing(AdapterClient(bob).load("x"))
            await failing(stranger.complete("a prompt that nobody may see"))
            await bob.complete("another prompt")
        refused = [
            await serving.metric(f'slipstream_callers_refused_total{{reason="{reason}"}}')
            for reason in ("UNAUTHENTICATED", "NOT_PERMITTED", "TOKEN_REVOKED")
        ]
    peer = "ipv4:127.0.0.1"
    assert lines.told() == [
        {"event": "act", "method": LOAD, "caller": "alice", "peer": peer, "outcome": "OK"}
        | {"adapter": "french\nforged", "path": "fr/1"},
        {"event": "act", "method": LOAD.replace("Load", "Unload"), "caller": "alice", "peer": peer}
        | {"outcome": "ADAPTER_NOT_FOUND", "adapter": "german"},
        {"event": "refused", "method": LOAD, "caller": "bob", "peer": peer, "reason": "NOT_PERMITTED"},
        {"event": "refused", "method": "/slipstream.v1.InferenceService/Generate", "peer": peer}
        | {"reason": "UNAUTHENTICATED"},
    ]
    assert refused == [1, 1, 0]
    whole = "\n".join(lines.texts)
    assert len(whole.splitlines()) == len(lines.texts), "a name makes no line of its own"
    assert not any(secret in whole for secret in (ALICE, BOB, WRONG, "prompt"))


async def test_a_flood_of_refusals_is_a_line_and_a_count(
    serve: Serve, tokens: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 200
    monkeypatch.setattr(audit_log, "QUIET_SECONDS", 3600.0)
    async with serve(auth_token_file=tokens) as serving:
        async with SlipstreamClient(serving.target, token=WRONG) as stranger:
            failed = await asyncio.gather(*(failing(stranger.tokenize("a")) for _ in range(calls)))
        assert {each.code for each in failed} == {grpc.StatusCode.UNAUTHENTICATED}
        assert [each["event"] for each in lines.told()] == ["refused"]
        assert await serving.metric('slipstream_callers_refused_total{reason="UNAUTHENTICATED"}') == calls


async def test_a_flood_that_ends_is_still_counted(
    serve: Serve, tokens: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write, left_out = asyncio.Event(), audit_log.write, [0]

    def heard(event: str, **facts: Any) -> None:
        write(event, **facts)
        left_out[0] += facts.get("left_out") or 0
        if left_out[0] == 4:
            written.set()

    monkeypatch.setattr(audit_log, "write", heard)
    # Each call below is refused within it, and it is over soon.
    monkeypatch.setattr(audit_log.Floods, "admits", _once())
    monkeypatch.setattr(audit_log, "QUIET_SECONDS", 0.01)
    async with serve(auth_token_file=tokens) as serving:
        async with SlipstreamClient(serving.target, token=WRONG) as stranger:
            await asyncio.gather(*(failing(stranger.tokenize("a")) for _ in range(5)))
            async with asyncio.timeout(10):
                await written.wait()
    counts = [each["left_out"] for each in lines.told() if each["event"] == "left out"]
    assert counts and sum(counts) == 4


class _From:
    """Of a call's context, from where it comes."""

    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        """As gRPC names it."""
        return f"ipv4:{self._address}:4711"


async def test_refusals_hide_no_act_and_many_flushes_are_a_line(lines: Lines) -> None:
    flush, made = "/vllm.grpc.engine.VllmEngine/FlushCache", Audit(RpcMetrics(CollectorRegistry()))

    async def call(address: str, error: Exception | None = None) -> None:
        async with made.around(flush, cast(Context, _From(address))):
            if error is not None:
                raise error

    for number in range(2 * MOST_LINES):
        with pytest.raises(Unauthenticated):
            await call(f"10.0.0.{number}", Unauthenticated("no token"))
    for _ in range(200):
        await call("10.1.0.1")
    told = lines.told()
    assert [each["event"] for each in told] == ["refused"] * MOST_LINES + ["act"]
    assert told[-1] == {"event": "act", "method": flush, "peer": "ipv4:10.1.0.1", "outcome": "OK"}
    made._tell()
    assert lines.told()[-2:] == [
        {"event": "left out", "of": "acts", "left_out": 199},
        {"event": "left out", "of": "refusals", "left_out": MOST_LINES},
    ]


def _once() -> Any:
    admitted: list[object] = []

    def admits(self: Floods, *key: str) -> bool:
        if admitted:
            self._left_out += 1
            return False
        admitted.append(key)
        return True

    return admits


def test_callers_of_many_names_get_so_many_lines_and_no_more() -> None:
    now = 0.0
    floods = Floods(lambda: now)
    assert [floods.admits("one") for _ in range(3)] == [True, False, False]
    assert sum(floods.admits(str(number)) for number in range(1000)) == MOST_LINES - 1
    assert floods.take_left_out() == 2 + 1000 - (MOST_LINES - 1)
    assert floods.take_left_out() is None
    now += QUIET_SECONDS
    assert floods.admits("one")
    for _ in range(3 * MOST_KEYS):
        now += QUIET_SECONDS
        floods.admits(str(now))
    assert len(floods._latest) == MOST_KEYS
