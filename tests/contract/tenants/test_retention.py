"""What kept streams take is given back exactly, what is remembered of those that went is bounded, and who gives way."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.client import CallFailed
from service.resume import retention
from service.resume.history import EMPTY_SEGMENT_BYTES
from service.resume.retention import STREAM_BYTES
from tests.contract.tenants.test_tenants_served import ALICE, BOB, files
from tests.support.kept_server import GREEDY, Seen, kept_server
from tests.system.test_attach import begun, refusal, rest


async def test_requests_that_the_engine_refuses_take_nothing_of_the_bound() -> None:
    """Ten refusals, where there is room for two streams."""
    async with kept_server(resume_bytes=3 * STREAM_BYTES, resume_tenant_bytes=3 * STREAM_BYTES) as server:
        async with server.client() as client:
            taken = client.generate([3], request_id="taken", max_tokens=6000, **GREEDY)
            await anext(taken)
            for _ in range(10):
                with pytest.raises(CallFailed) as refused:
                    await client.complete([3], request_id="taken", resumable=True, max_tokens=2, **GREEDY)
                assert refused.value.reason == "DUPLICATE_REQUEST_ID"
            assert server.sample("slipstream_kept_stream_bytes") == 0
            await client.complete([3], request_id="fine", resumable=True, max_tokens=2, want_text=False, **GREEDY)
            assert server.sample("slipstream_kept_stream_bytes") == STREAM_BYTES + EMPTY_SEGMENT_BYTES + 2 * 4
            await taken.aclose()


async def test_only_so_many_streams_that_are_gone_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest of them are told why; of the others the server says that there is no such stream."""
    monkeypatch.setattr(retention, "MAX_REMEMBERED", 2)
    async with kept_server(resume_bytes=3 * STREAM_BYTES, resume_tenant_bytes=3 * STREAM_BYTES) as server:
        async with server.client() as client:
            for number in range(7):
                await client.complete([3], request_id=f"n{number}", resumable=True, max_tokens=2, **GREEDY)
            assert server.sample("slipstream_kept_streams_gone_total", how="evicted") == 5
            reasons = [(await refusal(client, f"n{number}"))[1] for number in range(5)]
            assert reasons == ["STREAM_NOT_FOUND"] * 3 + ["STREAM_EVICTED"] * 2
            for number in (5, 6):
                assert len((await rest(client, f"n{number}", Seen())).ids[0]) == 2


async def test_the_tenant_that_has_most_gives_way_to_all_others(tmp_path: Path) -> None:
    """Only the bound of all together binds: a tenant with one stream keeps it, whichever tenants fill the rest."""
    room = 6 * STREAM_BYTES
    async with kept_server(resume_bytes=room, resume_tenant_bytes=room, **files(tmp_path)) as server:
        async with server.client(token=ALICE) as alice, server.client(token=BOB) as bob:
            call, seen = await begun(bob, "his", 100)
            await rest(bob, "his", seen)
            for number in range(9):
                await alice.complete([3], request_id=f"hers-{number}", resumable=True, max_tokens=20, **GREEDY)
                assert server.sample("slipstream_kept_stream_bytes") <= room
            call.cancel()
            try:
                again = (await rest(bob, "his", Seen())).outcome
            except CallFailed as error:
                again = error.reason
            assert again == seen.outcome
            assert (await refusal(alice, "hers-0"))[1] == "STREAM_EVICTED"
            assert len((await rest(alice, "hers-8", Seen())).ids[0]) == 20
