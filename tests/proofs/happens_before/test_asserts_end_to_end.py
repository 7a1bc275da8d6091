"""A violation planted in the relay is seen from outside: counted, scraped, or fatal, as the mode says."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from core import invariants
from core.device.event import Event
from core.engine.api import EngineState
from core.engine.async_engine import AsyncEngine
from core.errors import EngineDead, RequestFailed
from core.models.bundled import bundled_model_dir
from core.relay.future_map import FutureMap
from core.relay.payload import RelayPayload
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, GenerateRequest
from service.bench.emulated import expected_output
from service.client import CallFailed
from tests.support.servers import serve_checkpoint
from tests.support.until import until
from tests.unit.core.engine.emulation import ask, last, read, running

PLANTED_AT = 7
"""Which stash, or which publication, goes wrong; all others are right."""


def forget_a_row(patch: pytest.MonkeyPatch, at: int = PLANTED_AT) -> None:
    """One stash leaves out its first row."""
    stash, calls = FutureMap.stash, iter(range(1, 10**6))

    def forgetful(self: FutureMap, rows: torch.Tensor, payload: RelayPayload) -> None:
        skipped = int(next(calls) == at)
        stash(self, rows[skipped:], RelayPayload(payload.output_tokens[skipped:]))

    patch.setattr(FutureMap, "stash", forgetful)


def publish_another_length(patch: pytest.MonkeyPatch) -> None:
    """One publication is off by one for its first row."""
    publish, calls = FutureMap.publish, iter(range(1, 10**6))

    def wrong(self: FutureMap, rows: torch.Tensor, seq_lens: torch.Tensor) -> Event | None:
        lens = seq_lens.clone()
        lens[0] += next(calls) == PLANTED_AT
        return publish(self, rows, lens)

    patch.setattr(FutureMap, "publish", wrong)


PLANTS = [(forget_a_row, "relay_unwritten_read"), (publish_another_length, "relay_seq_len")]


async def seen(engine: AsyncEngine, request: GenerateRequest) -> tuple[list[int], RequestFailed | None]:
    """The ids that a client got, and what its stream failed with."""
    ids: list[int] = []
    try:
        async for event in await engine.generate(request):
            ids += event.token_ids if isinstance(event, Delta) else ()
    except RequestFailed as error:
        return ids, error
    return ids, None


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("plant", "check"), PLANTS)
async def test_count_fails_one_row_and_its_neighbours_go_on(
    bundled_tokenizer: Tokenizer,
    plant: Callable[[pytest.MonkeyPatch], None],
    check: str,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    async with running(bundled_tokenizer, assert_mode="count", overlap=overlap) as engine:
        prompts = [(5, 5), (6, 6), (7, 7)]
        asked = [ask(prompt, tokens=40) for prompt in prompts]
        answers = await asyncio.gather(*(seen(engine, request) for request in asked))
        right = [expected_output(list(prompt), 40, bundled_tokenizer.vocab_size) for prompt in prompts]
        failed = [place for place, (_, error) in enumerate(answers) if error is not None]
        assert len(failed) == 1 and isinstance(answers[failed[0]][1], RequestFailed)
        for place, ((ids, _), tokens) in enumerate(zip(answers, right, strict=True)):
            # No token that follows from a wrong input reaches the client.
            assert ids == (tokens[: len(ids)] if place in failed else tokens)
        assert {name for name, count in engine.stats.assert_failures.items() if count} == {check}
        assert engine.stats.assert_failures[check] == 1
        assert engine.state is EngineState.READY


@pytest.mark.parametrize(("plant", "check"), PLANTS)
async def test_off_sees_nothing(
    bundled_tokenizer: Tokenizer,
    plant: Callable[[pytest.MonkeyPatch], None],
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    async with running(bundled_tokenizer, assert_mode="off") as engine:
        await read(engine, ask(tokens=40))
        assert not any(engine.stats.assert_failures.values())


@pytest.mark.parametrize(("plant", "check"), PLANTS)
async def test_trap_ends_the_engine_and_every_stream(
    bundled_tokenizer: Tokenizer,
    plant: Callable[[pytest.MonkeyPatch], None],
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    async with running(bundled_tokenizer, assert_mode="trap") as engine:
        streams = [await engine.generate(ask((n + 1,), tokens=200)) for n in range(3)]
        for stream in streams:
            with pytest.raises(EngineDead):
                await asyncio.wait_for(last(stream), 5)
        assert check in str(await asyncio.wait_for(engine.wait_dead(), 5))
        assert engine.state is EngineState.DEAD and engine.live_requests == 0


async def test_the_service_shows_it_to_a_scraper(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_a_row(monkeypatch)
    async with serve_checkpoint(Path(bundled_model_dir()), assert_mode="count") as (server, client):
        assert await _failures(server.metrics_port) == {}
        with pytest.raises(CallFailed, match="INTERNAL"):
            await client.complete("The quick brown", max_tokens=20, temperature=0.0, ignore_eos=True)
        assert await _failures(server.metrics_port) == {"relay_unwritten_read": 1.0}


async def _failures(port: int) -> dict[str, float]:
    """Checks that were violated, as a scrape has them; every known check must be there."""

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return str(response.read().decode())

    prefix = 'slipstream_assert_failures_total{check="'
    lines = [line for line in (await asyncio.to_thread(scrape)).splitlines() if line.startswith(prefix)]
    counts = {line[len(prefix) : line.index('"}')]: float(line.split()[-1]) for line in lines}
    assert {"relay_unwritten_read", "relay_seq_len", *invariants.HOST_CHECKS} == set(counts)
    return {name: count for name, count in counts.items() if count}


async def bend_a_payload(engine: AsyncEngine, request_id: str, patch: pytest.MonkeyPatch) -> None:
    """On the forward thread: a stash with one value too few."""
    stash = FutureMap.stash
    patch.setattr(FutureMap, "stash", lambda self, rows, _: stash(self, rows, RelayPayload(rows[1:])))


async def change_an_owner(engine: AsyncEngine, request_id: str, patch: pytest.MonkeyPatch) -> None:
    """On the loop: a row's generation moves on without its owner, who then gives it back."""
    rows = engine._scheduler.memory.rows
    await until(lambda: rows.used > 0)
    rows.generations[1:] += 1
    engine.abort(request_id)


@pytest.mark.parametrize(
    ("plant", "check"), [(bend_a_payload, "relay_payload_shape"), (change_an_owner, "row_foreign_generation")]
)
async def test_a_host_check_is_counted_and_ends_the_engine(
    bundled_tokenizer: Tokenizer,
    plant: Callable[[AsyncEngine, str, pytest.MonkeyPatch], Awaitable[None]],
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(invariants.FAILURES, check, 0)
    async with running(bundled_tokenizer) as engine:
        stream = await engine.generate(ask(tokens=1500))
        await plant(engine, stream.request_id, monkeypatch)
        with pytest.raises(EngineDead):
            await asyncio.wait_for(last(stream), 5)
        cause = await asyncio.wait_for(engine.wait_dead(), 5)
        assert isinstance(cause, invariants.InvariantViolation) and check in str(cause)
        assert invariants.FAILURES[check] == 1
