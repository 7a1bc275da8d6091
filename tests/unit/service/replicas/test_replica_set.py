"""Several engines as one: each request in one of them, all of them in step, and what ends takes only its own along."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from core.errors import DuplicateRequest, Overloaded, RequestAborted
from core.types.io import Started
from core.types.sampling_params import SamplingParams
from core.types.streams import StreamInfo
from service.config.server_config import ServerConfig
from service.replicas.builder import replicated
from tests.support.kept_server import small_engine
from tests.support.until import PATIENCE, until
from tests.unit.service.replicas.rig import Rig, ask, ends, read, replicas, tokens

LONG = 4000
SAME = tuple(range(5, 205))


async def test_every_request_gets_what_one_engine_would_give() -> None:
    alone = await small_engine().start()
    requests = [ask((7 + place, 8, 9), 5 + place, n=1 + place % 2) for place in range(8)]
    try:
        wanted = [await read(alone, request) for request in requests]
    finally:
        await alone.stop()
    async with replicas() as rig:
        found = await asyncio.gather(*(read(rig.replicas, request) for request in requests))
        for request, mine, theirs in zip(requests, found, wanted, strict=True):
            assert isinstance(mine[0], Started) and mine[0].prompt_tokens == 3
            for index in range(request.sampling.n):
                assert tokens(mine, index) == tokens(theirs, index)
            assert [end.usage.completion_tokens for end in ends(mine)] == [
                end.usage.completion_tokens for end in ends(theirs)
            ]
        await until(lambda: rig.replicas.stats.finished["length"] == sum(each.sampling.n for each in requests))
        sent = [each.requests for each in rig.replicas.stats.replicas]
        assert sum(sent) == 8 and min(sent) >= 3, "both had a part"


async def test_a_prompt_goes_where_its_beginning_was_computed_unless_that_engine_has_much_to_do() -> None:
    async with replicas(3) as rig:
        places = set()
        for turn in range(6):
            before = [each.requests for each in rig.replicas.stats.replicas]
            await read(rig.replicas, ask((*SAME, turn), 2))
            after = [each.requests for each in rig.replicas.stats.replicas]
            places.add([new - old for new, old in zip(after, before)].index(1))
        assert len(places) == 1
        assert {book.seen.most for book in rig.replicas._router.books} == {64 * 1024 // 64}, (
            "as much as its cache holds"
        )
        cached = sum(each.cached_tokens for each in [engine.stats for engine in rig.engines.values()])
        assert cached >= 5 * 192
        assert sum(each.matched for each in rig.replicas.stats.replicas) == 5
        streams = [await rig.replicas.generate(ask((*SAME, turn), LONG)) for turn in range(12)]
        for stream in streams:
            assert isinstance(await anext(stream), Started)
        assert all(each.requests for each in rig.replicas.stats.replicas), "others take their part of many"
        for stream in streams:
            await stream.aclose()


async def test_an_engine_that_starts_again_has_seen_no_prompt() -> None:
    async with replicas(1) as rig:
        for turn in range(2):
            await read(rig.replicas, ask((*SAME, turn), 2))
        assert rig.replicas.stats.replicas[0].matched == 1
        rig.lose(0)
        await until(lambda: len(rig.processes) == 2 and rig.replicas.stats.replicas[0].ready)
        await read(rig.replicas, ask(SAME, 2))
        assert rig.replicas.stats.replicas[0].matched == 1, "its cache is empty"


async def test_ids_are_unique_among_engines_and_end_by_them() -> None:
    async with replicas() as rig:
        stream = await rig.replicas.generate(ask((5, 6), LONG, request_id="mine"))
        other = await rig.replicas.generate(ask((5, 7), LONG))
        assert {info.request_id for info in rig.replicas.open_streams.oldest(5)} == {"mine", other.request_id}
        for _ in range(2):
            with pytest.raises(DuplicateRequest):
                await rig.replicas.generate(ask((5, 6), request_id="mine"))
        assert not await rig.replicas.abort("another")
        assert await rig.replicas.abort("mine")
        (end,) = ends([event async for event in stream])
        assert end.reason.value == "cancelled"
        assert not await rig.replicas.abort("mine")
        assert len(tokens(await read(rig.replicas, ask((5, 6), request_id="mine")))) == 4
        await other.aclose()
        await until(lambda: not any(engine.live_requests for engine in rig.engines.values()))


async def test_two_requests_with_one_id_at_once_are_one_too_many() -> None:
    async with replicas() as rig:
        asking = [asyncio.create_task(rig.replicas.generate(ask((5, 6), 4, request_id="r"))) for _ in range(2)]
        await asyncio.wait(asking)
        assert sorted(type(task.exception()).__name__ for task in asking) == ["DuplicateRequest", "NoneType"]


async def test_a_request_can_be_aborted_while_engines_are_asked() -> None:
    async with replicas() as rig:
        going, gate = asyncio.Event(), asyncio.Event()

        async def refuse(_request: Any) -> None:
            going.set()
            await gate.wait()
            raise Overloaded("the waiting queue is full", reason="QUEUE_FULL")

        rig.engines[0].generate = refuse  # type: ignore[method-assign]
        asking = asyncio.create_task(rig.replicas.generate(ask((5, 6), LONG, request_id="r")))
        await going.wait()
        await rig.replicas.abort("r")
        gate.set()
        with pytest.raises(RequestAborted):
            await asking
        assert not rig.replicas.live_requests and not rig.engines[1].live_requests


async def test_an_id_that_its_caller_has_just_left_is_free() -> None:
    async with replicas() as rig:
        for _ in range(40):
            stream = await rig.replicas.generate(ask((5, 6), LONG, request_id="r"))
            await stream.aclose()
        await until(lambda: not any(engine.live_requests for engine in rig.engines.values()))
        assert not rig.replicas.live_requests


async def test_what_ends_with_its_first_answer_is_open_no_more() -> None:
    async with replicas() as rig:
        for engine in rig.engines.values():
            generate = engine.generate

            async def late(request: Any, generate: Any = generate) -> Any:
                stream = await generate(request)
                while stream.open_outputs:
                    await asyncio.sleep(0.001)
                return stream

            engine.generate = late  # type: ignore[method-assign]
        for place in range(4):
            assert len(tokens(await read(rig.replicas, ask((5, place), 1)))) == 1
        assert rig.replicas.live_requests == 0


async def test_a_request_that_one_has_no_room_for_goes_to_the_next() -> None:
    async with replicas() as rig:
        full = rig.engines[0]
        refused: list[str] = []

        async def refuse(request: Any) -> Any:
            refused.append(request.request_id)
            raise Overloaded("the waiting queue is full", reason="QUEUE_FULL")

        full.generate = refuse  # type: ignore[method-assign]
        asking = (read(rig.replicas, ask((5, 6), 2, request_id=f"r{place}")) for place in range(4))
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(each, list) and len(tokens(each)) == 2 for each in found) and refused
        assert not rig.replicas.stats.replicas[0].requests, "what it refused it was not sent"
        rig.engines[1].generate = refuse  # type: ignore[method-assign]
        with pytest.raises(Overloaded, match="queue is full"):
            await rig.replicas.generate(ask((5, 6), request_id="last"))
        assert refused[-2:] == ["last", "last"]
        for book in rig.replicas._router.books:
            assert (book.rows, book.held, book.prefill) == (0, 0, 0), "what was refused is in no book"


async def test_what_ended_is_told_as_its_engine_counted_it() -> None:
    async with replicas() as rig:
        told: list[StreamInfo] = []
        rig.replicas.open_streams.on_end(told.append)
        for place in range(4):
            await read(rig.replicas, ask((place, *SAME), 3, request_id=f"r{place}"))
        stream = await rig.replicas.generate(ask((9, 9), LONG, request_id="closed"))
        assert isinstance(await anext(stream), Started)
        await stream.aclose()
        await until(lambda: len(told) == 5)
        by_id = {info.request_id: info for info in told}
        assert {(by_id[f"r{place}"].prompt_tokens, by_id[f"r{place}"].output_tokens) for place in range(4)} == {
            (201, 3)
        }
        assert by_id["closed"].prompt_tokens == 2
        assert len(rig.replicas.open_streams) == rig.replicas.live_requests == 0


async def test_tokens_and_text_come_from_any() -> None:
    async with replicas() as rig:
        ids = await rig.replicas.tokenize("Once upon a time")
        assert "Once upon a time" in await rig.replicas.detokenize(ids)
        assert rig.replicas.model_info.vocab_size > 0
        rig.lose(0)
        await until(lambda: not rig.replicas.stats.replicas[0].ready)
        assert await rig.replicas.tokenize("a") is not None


async def test_a_drain_gives_streams_their_time_and_refuses_more() -> None:
    passed, told = asyncio.Event(), list[float]()
    async with replicas() as rig:
        for engine in rig.engines.values():
            drain = engine.drain

            async def until_passed(seconds: float, drain: Any = drain) -> int:
                # By no clock: on a busy machine the short ones may take any time.
                told.append(seconds)
                giving = asyncio.create_task(drain(9 * PATIENCE))
                await passed.wait()
                giving.cancel()
                return int(await drain(0.0))

            engine.drain = until_passed  # type: ignore[method-assign]
        short = [await rig.replicas.generate(ask((place + 5, 6), 30)) for place in range(4)]
        endless = await rig.replicas.generate(ask((50, 6), LONG))
        draining = asyncio.create_task(rig.replicas.drain(0.5))
        await asyncio.sleep(0)
        with pytest.raises(Exception, match="draining"):
            await rig.replicas.generate(ask((5, 6)))
        for stream in short:
            assert len(tokens([event async for event in stream])) == 30
        passed.set()
        assert await asyncio.wait_for(draining, PATIENCE) == 1 and told == [0.5, 0.5]
        with pytest.raises(Exception, match=r"drain|shut"):
            async for _ in endless:
                pass
        await rig.replicas.stop()
        await rig.replicas.stop()
        assert [process.returncode for process in rig.processes] == [0, 0], "they ended by themselves"


async def test_requests_without_a_seed_are_seeded_once_for_all_engines() -> None:
    request = replace(ask((5, 6), 6), sampling=SamplingParams(max_tokens=6, temperature=5.0, ignore_eos=True))
    async with replicas(seed=7) as rig:
        seeds: list[int | None] = []
        for engine in rig.engines.values():
            generate = engine.generate

            async def seen(asked: Any, generate: Any = generate) -> Any:
                seeds.append(asked.sampling.seed)
                return await generate(asked)

            engine.generate = seen  # type: ignore[method-assign]
        for _ in range(6):
            await read(rig.replicas, request)
        draw = random.Random(7)
        assert seeds == [draw.getrandbits(63) for _ in range(6)], "as one engine draws them"
        await read(rig.replicas, replace(request, sampling=replace(request.sampling, seed=3)))
        assert seeds[-1] == 3


def counted(rig: Rig) -> int:
    """First tokens in the histogram of their times."""
    known = rig.replicas.stats.histograms.get("time_to_first_token_seconds")
    return 0 if known is None else known.counts[-1]


async def test_histograms_stay_between_the_snapshots_that_have_them() -> None:
    async with replicas() as rig:
        for place in range(4):
            await read(rig.replicas, ask((place, 6)))
        await until(lambda: counted(rig) == 4)
        for _ in range(4):
            heard = [each.engine.link.heard for each in rig.replicas._replicas]
            await until(lambda: all(e.engine.link.heard > h for e, h in zip(rig.replicas._replicas, heard)))  # noqa: B023
            assert counted(rig) == 4


async def test_progress_is_that_of_the_first() -> None:
    rig, config, told = Rig(), ServerConfig.of(data_parallel=2), []
    built = replicated(config, rig.spawn)(config.engine_config(), lambda stage, part: told.append((stage, part)))
    engines = await built.start()
    await engines.stop()
    assert told == [("weights", 0.5)]
