"""One table says who may call what: every registered method is in it, and what is not is refused to all."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from core.errors import ConfigError
from service.access import permissions
from service.access.permissions import METHODS, Permission, Permissions
from service.access.token_file import UNNAMED
from service.client import CallFailed, SlipstreamClient
from service.client.adapters import AdapterClient
from service.config.server_config import ServerConfig
from service.server.server import Server
from tests.security import methods
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.granted import granted
from tests.support.servers import Serve

ALICE, BOB, NAMELESS = "alice-0123456789abcdef", "bobby-0123456789abcdef", "nameless-0123456789abcdef"


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(f"alice:{ALICE}\nbob:{BOB}\n{NAMELESS}\n")
    return str(path)


async def test_every_registered_method_is_in_the_table(config: Callable[..., ServerConfig]) -> None:
    with methods.registered() as found:
        Server(config(reflection=True), lambda *_: FakeEngine())
    assert set(found) - set(METHODS) == set(), "no permission says who may call them"
    left = set(METHODS) - set(found)
    # The dialects are there where their messages are installed.
    assert (
        left == set() if find_spec("smg_grpc_proto") else {name.split(".")[0] for name in left} == {"/sglang", "/vllm"}
    )
    assert {name for name, each in METHODS.items() if each is Permission.PUBLIC} == {
        f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch")
    }


async def test_a_method_that_is_in_no_table_is_refused_to_all(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = "/slipstream.v1.InferenceService/Tokenize"
    left = {name: each for name, each in METHODS.items() if name != forgotten}
    for room in (permissions, __import__("service.access.auth_interceptor", fromlist=["auth"])):
        monkeypatch.setattr(room, "METHODS", left)
    async with serve(unnamed_callers="all") as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.tokenize("a")
        with granted("a method that is listed"):
            await serving.client.complete("hi")
    assert (failed.value.code.name, failed.value.reason) == ("PERMISSION_DENIED", "NOT_PERMITTED")


def test_names_open_what_is_theirs_and_admins_the_rest(config: Callable[..., ServerConfig], tokens: str) -> None:
    may = Permissions(config(auth_token_file=tokens, admins="alice, unnamed")).may
    opened = {
        caller: {each.value for each in Permission if may(caller, each)} for caller in ("alice", "bob", UNNAMED, None)
    }
    assert opened == {
        "alice": {"public", "call", "own", "admin"},
        "bob": {"public", "call", "own"},
        UNNAMED: {"public", "call"},
        None: {"public", "call"},
    }
    sees = Permissions(config(auth_token_file=tokens, admins="alice")).sees_all
    assert [sees(caller) for caller in ("alice", "bob", UNNAMED, None)] == [True, False, False, True]
    with pytest.raises(ConfigError, match="admins needs auth_token_file or tls_client_ca"):
        config(admins="alice")


async def test_only_admins_change_what_others_are_served(serve: Serve, tokens: str) -> None:
    codes: dict[str, str] = {}
    async with serve(auth_token_file=tokens, admins="carol, alice") as serving:
        for name, token in (("alice", ALICE), ("bob", BOB), ("nameless", NAMELESS)):
            async with SlipstreamClient(serving.target, token=token) as client:
                with granted("a stream for each of them"):
                    await client.complete("hi")
                try:
                    await AdapterClient(client).load(name)
                    codes[name] = "OK"
                except CallFailed as failed:
                    codes[name] = f"{failed.code.name} {failed.reason}"
    assert codes == {
        "alice": "OK",
        "bob": "PERMISSION_DENIED NOT_PERMITTED",
        "nameless": "PERMISSION_DENIED NOT_PERMITTED",
    }


async def test_without_admins_there_are_none(serve: Serve, tokens: str) -> None:
    async with serve(auth_token_file=tokens) as serving:
        async with SlipstreamClient(serving.target, token=BOB) as bob:
            with pytest.raises(CallFailed) as refused:
                await AdapterClient(bob).load("x")
    assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED and "--admins" in refused.value.message


async def test_a_refused_call_is_not_read(serve: Serve, tokens: str) -> None:
    async with serve(auth_token_file=tokens) as serving:
        method: Any = serving.client.channel.unary_unary("/slipstream.v1.AdapterService/LoadAdapter")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            # No protobuf at all: had it been read, this were INVALID_ARGUMENT.
            await method(b"\xff\xff\xff", metadata=(("authorization", f"Bearer {BOB}"),))
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
