"""What goes wrong while keys are on their way: adapters, weights, sleep, ends and deaths at each moment of it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.config import EngineConfig, LoraConfig
from core.disagg.interface import TransferFailed
from core.engine.api import EngineState
from core.engine.build import build_engine
from core.engine.disagg import _room, facts_of
from core.errors import AdapterNotFound, Overloaded, QueueTimeout, RequestAborted
from core.scheduler.host_cache import HostCache
from core.types.handover import HandOver, TakeOver
from core.types.io import Finished
from tests.proofs.equivalence.test_disaggregation import pair, with_role
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, answer, config
from tests.support.engines import started
from tests.unit.core.engine.test_disagg import PROMPT, asked, source_of, until
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter


@pytest.fixture
def made(checkpoint_of: Callable[[str], Path]) -> EngineConfig:
    return config(checkpoint_of("llama"), ROOMY, room=ROOM, overlap=True, cache="radix")


def kept_by(engine: Any) -> HostCache:
    kept: HostCache | None = engine._scheduler.host_cache
    assert kept is not None and kept.taking is not None
    return kept


async def test_adapters_of_one_name_and_other_weights_share_no_keys(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = checkpoint_of("llama")
    made = config(directory, ROOMY, room=ROOM, overlap=True, cache="none")
    ways = []
    for seed in (3, 4):
        (tmp_path / str(seed)).mkdir()
        way = str(make_adapter(directory, tmp_path / str(seed), seed, **ADAPTERS["all"]))
        ways.append(dataclasses.replace(made, lora=LoraConfig(adapters=(("one", way),))))
    async with started(build_engine(with_role(ways[0], "prefill"))) as prefill:
        async with started(build_engine(with_role(ways[1], "decode"))) as decode:
            expected = await answer(decode, asked(adapter="one"))
            source = await source_of(prefill, asked(adapter="one"))
            assert await answer(decode, asked(adapter="one", take_over=source)) == expected
            stats = decode.stats.transfers
            assert stats is not None and stats.taken == 0 and stats.failures["gone"] == 1


async def test_an_adapter_that_is_unloaded_while_keys_are_awaited(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = checkpoint_of("llama")
    lora = LoraConfig(adapters=(("one", str(make_adapter(directory, tmp_path, 3, **ADAPTERS["all"]))),))
    made = dataclasses.replace(config(directory, ROOMY, room=ROOM, overlap=True, cache="radix"), lora=lora)
    async with pair(made) as (prefill, decode):
        waiting = TakeOver("127.0.0.1", prefill.model_info.transfer_port, "7")
        opening = asyncio.ensure_future(decode.generate(asked(adapter="one", take_over=waiting, request_id="x")))
        await until(lambda: decode._disagg._awaited.total() == 1)
        decode.unload_adapter("one")
        await answer(prefill, asked(adapter="one", hand_over=HandOver("7")))
        with pytest.raises(AdapterNotFound, match="unloaded"):
            await opening
        assert decode.live_requests == 0 and kept_by(decode).stats().nbytes == 0


@pytest.mark.parametrize("how", ["aborted", "cancelled"])
async def test_a_request_that_ends_in_the_turn_in_which_its_keys_arrive(made: EngineConfig, how: str) -> None:
    async with pair(made) as (prefill, decode):
        source, kept = await source_of(prefill, asked()), kept_by(decode)
        assert kept.taking is not None
        adopt = kept.taking.adopt

        def adopted(*given: Any) -> None:
            adopt(*given)
            if how == "aborted":
                assert decode.abort("x")
            else:
                opening.cancel()

        kept.taking.adopt = adopted  # type: ignore[method-assign]
        opening = asyncio.ensure_future(decode.generate(asked(take_over=source, request_id="x")))
        with pytest.raises((RequestAborted, asyncio.CancelledError)):
            await opening
        assert kept.stats().nbytes == 0, "nothing is kept for a request that was never queued"


async def test_an_engine_that_falls_asleep_between_a_reservation_and_its_use(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, asked())
        decode.prefixes.flush()
        source, kept = await source_of(prefill, asked()), kept_by(decode)
        vacate, vacated = kept.outgoing.vacate, list[Callable[[], None]]()
        kept.outgoing.vacate = lambda copy, then: vacate(copy, lambda: vacated.append(then))  # type: ignore[method-assign]
        opening = asyncio.ensure_future(answer(decode, asked(take_over=source)))
        await until(lambda: bool(vacated))
        await decode.control.sleep()
        vacated[0]()
        await until(lambda: decode.live_requests == 1)
        assert decode.state is EngineState.READY
        await decode.control.wake()
        await decode.control.resume()
        assert await opening == expected
        assert decode.stats.transfers is not None and decode.stats.transfers.failures["asleep"] == 1


async def test_nothing_waits_for_an_engine_that_died(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        giver = prefill._disagg.giver
        assert giver is not None
        giver.expect(_room(asked(), "room"))
        waiting = TakeOver("127.0.0.1", prefill.model_info.transfer_port, "room")
        opening = asyncio.ensure_future(answer(decode, asked(take_over=waiting)))
        await until(lambda: decode._disagg._awaited.total() == 1)
        prefill.die(RuntimeError("a check failed"))
        async with asyncio.timeout(10):
            assert len(await opening) == 8


async def test_a_queue_timeout_ends_a_request_that_waits_for_keys(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        giver = prefill._disagg.giver
        assert giver is not None
        giver.expect(_room(asked(), "never"))
        waiting = TakeOver("127.0.0.1", prefill.model_info.transfer_port, "never")
        async with asyncio.timeout(10):
            with pytest.raises(QueueTimeout):
                await decode.generate(asked(take_over=waiting, queue_timeout=0.3))


async def test_requests_that_wait_for_keys_are_bounded(made: EngineConfig) -> None:
    made = dataclasses.replace(made, scheduler=dataclasses.replace(made.scheduler, max_queued_requests=4))
    async with pair(made) as (prefill, decode):
        giver = prefill._disagg.giver
        assert giver is not None
        giver.expect(_room(asked(), "never"))
        waiting = TakeOver("127.0.0.1", prefill.model_info.transfer_port, "never")
        opening = [asyncio.ensure_future(decode.generate(asked(take_over=waiting))) for _ in range(10)]
        await until(lambda: sum(each.done() for each in opening) == 6)
        assert {type(each.exception()) for each in opening if each.done()} == {Overloaded}
        for each in opening:
            each.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await until(lambda: not decode._disagg._awaited and kept_by(decode).stats().nbytes == 0)


async def test_no_tenant_keeps_the_others_from_waiting_for_keys(made: EngineConfig) -> None:
    made = dataclasses.replace(made, scheduler=dataclasses.replace(made.scheduler, max_queued_requests=4))
    async with pair(made) as (prefill, decode):
        waiting = TakeOver("127.0.0.1", prefill.model_info.transfer_port, "never")
        crowd = [asyncio.ensure_future(decode.generate(asked(tenant="a", take_over=waiting))) for _ in range(4)]
        await until(lambda: decode._disagg._awaited["a"] == 4)
        others = [asyncio.ensure_future(decode.generate(asked(tenant="b", take_over=waiting))) for _ in range(3)]
        await until(lambda: others[2].done() and decode._disagg._awaited["b"] == 2)
        assert isinstance(others[2].exception(), Overloaded), "of two tenants each has a half"
        for each in (*crowd, *others):
            each.cancel()
        await asyncio.gather(*crowd, *others, return_exceptions=True)


async def test_the_server_s_queue_timeout_counts_too(made: EngineConfig) -> None:
    made = dataclasses.replace(made, scheduler=dataclasses.replace(made.scheduler, default_queue_timeout=0.3))
    async with pair(made) as (prefill, decode):
        waiting = TakeOver("127.0.0.1", prefill.model_info.transfer_port, "never")
        async with asyncio.timeout(10):
            with pytest.raises(QueueTimeout):
                await decode.generate(asked(take_over=waiting))


async def test_a_prompt_that_is_here_waits_for_no_other_engine(made: EngineConfig) -> None:
    """In SGLang's dialect that one may only begin to compute it."""
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, asked())
        waiting = TakeOver("127.0.0.1", prefill.model_info.transfer_port, "7")
        async with asyncio.timeout(10):
            assert await answer(decode, asked(take_over=waiting)) == expected
        await answer(prefill, asked(hand_over=HandOver("7")))
        await until(lambda: prefill.stats.transfers is not None and prefill.stats.transfers.given == 1)
        assert prefill.stats.transfers is not None and prefill.stats.transfers.kept == 0, "it was told"


async def test_a_prompt_that_is_here_is_not_refused_for_want_of_keys(made: EngineConfig) -> None:
    nowhere = TakeOver("127.0.0.1", 1, "r", "e")
    async with started(build_engine(with_role(made, "decode", transfer_failure="refuse"))) as engine:
        expected = await answer(engine, asked())
        assert await answer(engine, asked(take_over=nowhere)) == expected, "all of it is cached"


async def test_tokens_that_were_computed_here_are_not_told_as_cached(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        await answer(prefill, asked())
        source, kept = await source_of(prefill, asked()), kept_by(decode)
        assert kept.taking is not None
        adopt = kept.taking.adopt
        await answer(decode, asked(PROMPT[:9]))

        def evicted(*given: Any) -> None:
            adopt(*given)
            decode.prefixes.flush()

        kept.taking.adopt = evicted  # type: ignore[method-assign]
        events = [event async for event in await decode.generate(asked(take_over=source))]
        stats = decode.stats.transfers
        assert stats is not None and (stats.evicted, stats.taken) == (1, 0)
        assert isinstance(events[-1], Finished) and events[-1].usage.cached_tokens == 0


async def test_an_engine_that_cannot_start_listens_no_more(made: EngineConfig) -> None:
    built = build_engine(with_role(made, "prefill"))

    def fails(wake: Any) -> Any:
        raise MemoryError("no room")

    object.__setattr__(built, "new_executor", fails)
    with pytest.raises(MemoryError):
        await built.start()
    assert not [each for each in threading.enumerate() if each.name == "slipstream-give"]


async def test_a_prefill_that_finds_no_room_in_the_queue_is_expected_no_more(made: EngineConfig) -> None:
    async with started(build_engine(with_role(made, "prefill"))) as engine:
        room, giver = iter([True, False]), engine._disagg.giver
        engine._scheduler.has_room = lambda tenant, count: next(room, True)  # type: ignore[method-assign]
        with pytest.raises(Overloaded, match="queue is full"):
            await engine.generate(asked(hand_over=HandOver("7")))
        # Made on a thread of its own.
        await until(lambda: hasattr(giver, "_rooms"))
        rooms: Any = getattr(giver, "_rooms")  # noqa: B009
        await until(lambda: rooms.is_gone(_room(asked(), "7")))
        assert len(rooms) == 0


async def test_keys_reserved_before_a_change_of_weights_are_not_used(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, asked())
        decode.prefixes.flush()
        source, kept = await source_of(prefill, asked()), kept_by(decode)
        assert kept.taking is not None
        reserve = kept.taking.reserve

        def changed(*given: Any) -> Any:
            copy = reserve(*given)
            decode._scheduler.start_over()
            return copy

        kept.taking.reserve = changed  # type: ignore[method-assign]
        assert await answer(decode, asked(take_over=source)) == expected
        stats = decode.stats.transfers
        assert stats is not None and stats.failures["asleep"] == 1 and stats.taken == 0


async def test_nothing_is_fetched_before_its_blocks_are_vacated(made: EngineConfig) -> None:
    """Law 4: a step may still read what was there."""
    async with pair(made) as (prefill, decode):
        source, kept, taker = await source_of(prefill, asked()), kept_by(decode), decode._disagg._taker
        assert taker is not None
        take, vacate = taker.take, kept.outgoing.vacate
        vacated, order = list[Callable[[], None]](), list[str]()

        async def fetched(*given: Any) -> int:
            order.append("fetched")
            return await take(*given)

        taker.take = fetched  # type: ignore[method-assign]
        kept.outgoing.vacate = lambda copy, then: vacate(copy, lambda: vacated.append(then))  # type: ignore[method-assign]
        opening = asyncio.ensure_future(answer(decode, asked(take_over=source)))
        await until(lambda: bool(vacated))
        await asyncio.sleep(0.05)
        assert order == []
        vacated[0]()
        assert len(await opening) == 8 and order == ["fetched"]


async def test_blocks_that_are_still_written_stay_reserved(
    made: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The request goes on without its keys at once: reads that were begun end when they end."""
    async with pair(made) as (prefill, decode):
        source, taker = await source_of(prefill, asked()), decode._disagg._taker
        assert taker is not None
        ends = list[Callable[[], None]]()

        async def frozen(*_: Any) -> int:
            raise TransferFailed("timeout", "nothing came")

        taker.take = frozen  # type: ignore[method-assign]
        taker.settle = lambda parts, then: ends.append(then)  # type: ignore[method-assign]
        assert len(await answer(decode, asked(take_over=source))) == 8
        assert f"keys of 127.0.0.1 port {source.port} did not arrive (timeout): nothing came" in caplog.messages
        taking = kept_by(decode).taking
        assert taking is not None and len(ends) == 1
        held = taking._tier.used_bytes
        ends[0]()
        assert taking._tier.used_bytes == held - taking._tier.block


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_nothing_of_a_transfer_is_left_behind_an_engine(made: EngineConfig, role: str) -> None:
    names = {"prefill": "slipstream-give", "decode": "slipstream-take"}
    async with started(build_engine(with_role(made, role))):
        assert names[role] in [each.name for each in threading.enumerate()]
    assert names[role] not in [each.name for each in threading.enumerate()]


def test_engines_that_store_something_else_differ(made: EngineConfig, tmp_path: Path) -> None:
    def facts(*dtypes: torch.dtype, path: str = "") -> dict[str, Any]:
        storage = [torch.zeros(3, 2, dtype=each) for each in dtypes]
        memory = SimpleNamespace(page_size=4)
        pools: Any = SimpleNamespace(kv=SimpleNamespace(storage=storage), drafts=None, memory=memory)
        spec: Any = SimpleNamespace(architecture="A", name="n", quantization="", dtype="d")
        return facts_of(dataclasses.replace(made, model=dataclasses.replace(made.model, path=path)), spec, pools)

    half, whole = torch.float16, torch.float32
    assert facts(half, half) == facts(half, half)
    assert len({facts(*each)["layers"] for each in ((half, half), (half, whole), (half,), (torch.bfloat16, half))}) == 4
    found = list[str]()
    for number, (told, size) in enumerate((("{}", 3), ('{"a": 1}', 3), ("{}", 4))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(told)
        (folder / "model.safetensors").write_bytes(bytes(size))
        found.append(facts(half, path=str(folder))["checkpoint"])
    assert len(set(found)) == 3


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3_text"])
async def test_what_comes_with_a_state_or_window_comes_whole(checkpoint_of: Callable[[str], Path], family: str) -> None:
    """Behind a beginning that is cached too: a row that gets a state begins with no cached page."""
    made = config(checkpoint_of(family), ROOMY, room=ROOM, overlap=True, cache="radix")
    longer = (*PROMPT, *range(40, 60))
    async with pair(made) as (prefill, decode):
        expected = await answer(prefill, asked(longer))
        await answer(decode, asked(PROMPT))
        found = await answer(decode, asked(longer, take_over=await source_of(prefill, asked(longer))))
        stats = decode.stats.transfers
        assert stats is not None and (stats.taken, stats.taken_tokens, stats.evicted) == (1, 36, 0)
        assert found == expected
