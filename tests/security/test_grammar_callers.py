"""Grammars of their own are for callers that the operator names; the other forms of a constraint are for all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.engine.grammar.compile_queue import CompileJob, CompileQueue
from core.errors import ConfigError
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from tests.support.checkpoints import make_checkpoint
from tests.support.servers import Serve, serve_checkpoint

ALICE, BOB, NAMELESS = "alice-0123456789abcdef", "bobby-0123456789abcdef", "nameless-0123456789abcdef"
GRAMMAR = {"ebnf": 'root ::= "a"'}
OTHERS: tuple[dict[str, Any], ...] = ({"regex": "a"}, {"choice": ["a"]}, {"json_schema": "{}"})


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(f"alice:{ALICE}\nbob:{BOB}\n{NAMELESS}\n")
    return str(path)


async def answers(client: SlipstreamClient) -> str:
    for constraint in OTHERS:
        await client.complete("hi", constraint=constraint)
    try:
        await client.complete("hi", constraint=GRAMMAR)
    except CallFailed as failed:
        return f"{failed.code.name} {failed.reason}"
    return "OK"


REFUSED = "PERMISSION_DENIED NOT_PERMITTED"


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, {"alice": REFUSED, "bob": REFUSED, "nameless": REFUSED}),
        ("carol, alice", {"alice": "OK", "bob": REFUSED, "nameless": REFUSED}),
        ("unnamed", {"alice": REFUSED, "bob": REFUSED, "nameless": REFUSED}),
        ("*", {"alice": "OK", "bob": "OK", "nameless": "OK"}),
    ],
)
async def test_with_tokens(serve: Serve, tokens: str, listed: str | None, expected: dict[str, str]) -> None:
    found = {}
    async with serve(auth_token_file=tokens, grammar_callers=listed) as serving:
        for name, token in (("alice", ALICE), ("bob", BOB), ("nameless", NAMELESS)):
            async with SlipstreamClient(serving.target, token=token) as client:
                found[name] = await answers(client)
    assert found == expected


@pytest.mark.parametrize(("listed", "expected"), [(None, REFUSED), ("*", "OK")])
async def test_without_tokens(serve: Serve, listed: str | None, expected: str) -> None:
    async with serve(grammar_callers=listed) as serving:
        assert await answers(serving.client) == expected


async def test_a_resumable_request_asks_for_no_more_than_another(serve: Serve) -> None:
    async with serve() as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi", constraint=GRAMMAR, resumable=True)
    assert f"{failed.value.code.name} {failed.value.reason}" == REFUSED


def test_names_need_what_says_who_calls(config: Callable[..., ServerConfig]) -> None:
    with pytest.raises(ConfigError, match="grammar_callers needs auth_token_file or tls_client_ca"):
        config(grammar_callers="alice")


async def test_compiles_stand_in_the_line_of_their_caller(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(importlib.util.find_spec(name) for name in ("llguidance", "xgrammar")):
        pytest.skip("needs a grammar library")
    lines, add = list[str](), CompileQueue.add

    def seen(self: CompileQueue, job: CompileJob, tenant: str) -> None:
        lines.append(tenant)
        add(self, job, tenant)

    monkeypatch.setattr(CompileQueue, "add", seen)
    async with serve_checkpoint(make_checkpoint("llama", tmp_path), auth_token_file=tokens) as (server, _):
        for token, regex in ((ALICE, "[ab]"), (BOB, "[cd]")):
            async with SlipstreamClient(f"127.0.0.1:{server.port}", token=token) as client:
                await client.complete("hi", constraint={"regex": regex}, max_tokens=2)
    assert lines == ["alice", "bob"]
