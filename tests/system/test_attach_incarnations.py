"""A request id that is used again: each Attach brings the stream that it means, and no other of the same id."""

from __future__ import annotations

import pytest

from service.client import CallFailed, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.resume import retention
from service.resume.retention import STREAM_BYTES
from tests.support.fakes.granted import granted
from tests.support.kept_server import GREEDY, Seen, kept_server

SMALL = {"resume_bytes": 2 * STREAM_BYTES, "resume_tenant_bytes": 2 * STREAM_BYTES}
"""Room for one stream of a few tokens: the next one evicts it."""


async def made(client: SlipstreamClient, name: str, prompt: int) -> str:
    """Generate one resumable stream whole. Returns its incarnation."""
    told: list[str] = []
    options = {"request_id": name, "max_tokens": 12, "on_started": told.append, **GREEDY}
    async for _ in client.generate([prompt], resumable=True, **options):
        pass
    assert len(told) == 1
    return told[0]


async def attached(client: SlipstreamClient, name: str, incarnation: str) -> Seen:
    seen = Seen()
    async for event in client.attach(name, incarnation=incarnation):
        seen.note(event)
    return seen


async def refused(client: SlipstreamClient, name: str, incarnation: str) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        await attached(client, name, incarnation)
    return failed.value


async def test_the_stream_of_an_id_that_was_used_again_is_not_given_to_a_reader_of_the_earlier_one() -> None:
    async with kept_server(**SMALL) as server, server.client() as client:
        earlier = await made(client, "mine", 5)
        whole = await attached(client, "mine", earlier)
        assert whole.outcome == (await attached(client, "mine", "")).outcome, "an id with one stream needs no more"
        await made(client, "other", 7)
        assert (await refused(client, "mine", earlier)).reason == "STREAM_EVICTED"
        newer = await made(client, "mine", 6)
        for incarnation in (earlier, "", "never told"):
            failed = await refused(client, "mine", incarnation)
            assert (failed.code.name, failed.reason) == ("NOT_FOUND", "STREAM_REPLACED"), incarnation
            assert "incarnation" in str(failed)
        assert (await attached(client, "mine", newer)).outcome != whole.outcome
        assert server.sample("slipstream_attaches_total", how="STREAM_REPLACED") == 3


async def test_an_id_whose_earlier_streams_are_forgotten_needs_no_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_REMEMBERED", 2)
    async with kept_server(**SMALL) as server, server.client() as client:
        for name in ("mine", "other", "mine"):
            await made(client, name, 5)
        assert (await refused(client, "mine", "")).reason == "STREAM_REPLACED"
        # The first three push it out and then out of what is remembered.
        for name in ("one", "two", "three", "mine"):
            await made(client, name, 5)
        with granted("it is the one stream that is known of its id"):
            assert len((await attached(client, "mine", "")).ids[0]) == 12


async def test_a_stream_that_is_not_kept_has_no_incarnation_and_one_too_long_is_refused() -> None:
    async with kept_server() as server, server.client() as client:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5]), sampling_params=pb.SamplingParams(max_tokens=2, **GREEDY)
        )
        responses = [response async for response in client.stub.Generate(request)]
        assert responses[0].HasField("started") and not responses[0].started.incarnation
        failed = await refused(client, "mine", "x" * 65)
        assert failed.code.name == "INVALID_ARGUMENT" and list(failed.fields) == ["incarnation"]
