"""Whose share a request of each RPC uses, and with which weight, as the engine is told: by name, else by address."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from core.errors import Overloaded, StartupError
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from core.types.io import GenerateRequest
from service.access.caller import address_of
from service.access.tenant_file import parse_tenants
from service.client import SlipstreamClient
from service.frontends.remote_desk import RemoteDesk
from service.limits.tenant_limiter import Hold
from service.resume.retention import _digest
from tests.contract.tenants.test_tenants_served import ALICE, BOB, files
from tests.support.engines import started
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.servers import Serve
from tests.unit.service.frontends.test_pair import paired


async def test_each_call_is_its_tenants_with_the_weight_of_the_file_as_it_is_now(serve: Serve, tmp_path: Path) -> None:
    named = files(tmp_path, "alice: {weight: 3}\n")
    async with serve(FakeEngine(), **named) as serving:
        async with (
            SlipstreamClient(serving.target, token=ALICE) as alice,
            SlipstreamClient(serving.target, token=BOB) as bob,
        ):
            for client in (alice, bob):
                await client.complete("hi")
                await client.embed("hi")
            (tmp_path / "tenants").write_text("alice: {weight: 0.5, concurrent_requests: 9}\n")
            await alice.complete("hi")
        asked = [(each.request.tenant, each.request.weight) for each in serving.engine.streams if each.request.text]
        embedded = [(each.tenant, each.weight) for each in serving.engine.embedded]
    assert asked == [("alice", 3.0), ("bob", 1.0), ("alice", 0.5)]
    assert embedded == [("alice", 3.0), ("bob", 1.0)]


async def test_without_names_connections_of_one_address_share(serve: Serve) -> None:
    async with serve() as serving:
        for _ in range(2):
            async with SlipstreamClient(serving.target) as client:
                await client.complete("hi")
        assert {each.request.tenant for each in serving.engine.streams} == {"ipv4:127.0.0.1"}


async def test_a_front_end_passes_tenant_and_weight_on() -> None:
    engine = FakeEngine()
    await engine.start()
    async with paired(engine) as pair:

        async def enter(_tenant: str, _deadline: float | None, _work: Any = None) -> Hold:
            return Hold(weight=2.5)

        pair.desk.enter = enter  # type: ignore[method-assign]
        hold = await RemoteDesk(pair.remote, limited=True).enter("alice", None)
        assert hold.weight == 2.5 and hold.move().weight == 2.5
        await pair.remote.generate(GenerateRequest("a", token_ids=(5, 6), tenant="alice", weight=hold.weight))
        assert [(each.request.tenant, each.request.weight) for each in engine.streams] == [("alice", 2.5)]


def test_a_request_sent_again_from_elsewhere_is_the_same() -> None:
    first = GenerateRequest("a", text="hi", tenant="ipv4:10.0.0.1")
    assert _digest(first) == _digest(dataclasses.replace(first, tenant="ipv4:10.0.0.2", weight=2.0))
    assert _digest(first) != _digest(dataclasses.replace(first, text="ho"))


@pytest.mark.parametrize("weight", ["0", "-1", "0.001", "1000", ".nan", ".inf", "true", "heavy"])
def test_a_weight_is_a_number_within_bounds(weight: str) -> None:
    with pytest.raises(StartupError, match=r"f: 'alice': weight must be a number from 0.01 to 100"):
        parse_tenants(f"alice: {{weight: {weight}}}".encode(), "f")
    assert math.isclose(parse_tenants(b"alice: {weight: 0.25}", "f").of("alice").weight, 0.25)
    assert parse_tenants(b'"*": {weight: 2}', "f").of("bob").weight == 2.0


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:4711", "ipv4:10.0.0.1"),
        ("ipv6:%5B::1%5D:4711", "ipv6:%5B::1%5D"),
        ("unix:/run/s", "unix:/run/s"),
    ],
)
def test_a_port_is_no_part_of_an_address(peer: str, address: str) -> None:
    assert address_of(peer) == address


async def test_a_tenant_that_fills_the_queue_leaves_the_others_their_part() -> None:
    tokenizer = Tokenizer.load(str(bundled_model_dir()))
    async with started(emulated_engine(tokenizer, step_seconds=0.001, rows=1)) as engine:
        engine._scheduler._most_queued = 8

        async def ask(tenant: str) -> None:
            await engine.generate(GenerateRequest(token_ids=(5, 6, 7), tenant=tenant))

        async def fill(tenant: str) -> int:
            for taken in range(100):
                try:
                    await ask(tenant)
                except Overloaded as refused:
                    assert refused.reason == "QUEUE_FULL"
                    return taken
            raise AssertionError("there is no bound")

        assert await fill("a") >= 8, "one tenant alone has all of it"
        assert [await fill(tenant) for tenant in "bcd"] == [4, 2, 2]
        assert await fill("a") == 0
