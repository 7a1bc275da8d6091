"""Engines of one role: what they refuse, and what becomes of a request whose keys do not arrive."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ModelConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.engine.disagg import LEAST_HOST_BYTES, with_host_memory
from core.engine.ranks import open_ranks
from core.errors import ConfigError, DeadlinePassed, InvalidRequest, KeysLost, Overloaded, RequestAborted, StartupError
from core.types.handover import HandOver, TakeOver, claim_of
from core.types.io import Finished, FinishReason, GenerateRequest
from core.types.sampling_params import SamplingParams
from core.types.stats import TransferStats
from tests.proofs.equivalence.test_disaggregation import handed_over, pair, with_role
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, answer, config
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.engines import started
from tests.unit.core.memory.test_leases import ids

PROMPT = tuple(range(5, 25))
PATIENCE = 20.0


def asked(prompt: tuple[int, ...] = PROMPT, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **more.pop("sampling", {}))
    return GenerateRequest(token_ids=prompt, sampling=sampling, want_text=False, **more)


@pytest.fixture
def made(checkpoint_of: Callable[[str], Path]) -> EngineConfig:
    return config(checkpoint_of("llama"), ROOMY, room=ROOM, overlap=True, cache="radix")


async def source_of(prefill: AsyncEngine, request: GenerateRequest) -> TakeOver:
    handed = await handed_over(prefill, request)
    return TakeOver(handed.host, handed.port, handed.room, handed.engine_id)


async def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends, "it does not come to pass"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
async def test_requests_for_another_role_are_refused_by_name(made: EngineConfig, role: str) -> None:
    fields = {
        "hand_over": asked(hand_over=HandOver()),
        "take_over": asked(take_over=TakeOver("127.0.0.1", 1, "r", "e")),
    }
    async with started(build_engine(with_role(made, role))) as engine:
        for field, request in fields.items():
            if (role, field) in (("prefill", "hand_over"), ("decode", "take_over")):
                continue
            with pytest.raises(InvalidRequest, match=f"{field}: is for a server with --role .*has --role {role}"):
                await engine.generate(request)
        both = asked(sampling={"n": 2}, **{"hand_over": HandOver()} if role == "prefill" else {})
        if role == "prefill":
            with pytest.raises(InvalidRequest, match="hand_over: is not possible with images, sounds or several"):
                await engine.generate(both)
        assert len(await answer(engine, asked())) == 8, "whole requests are served by all"


async def test_a_prefill_ends_behind_one_token_and_says_where_its_keys_are(made: EngineConfig) -> None:
    async with started(build_engine(with_role(made, "prefill", transfer_timeout=0.1))) as engine:
        events = [event async for event in await engine.generate(asked(hand_over=HandOver("7")))]
        last = events[-1]
        assert isinstance(last, Finished) and last.reason is FinishReason.LENGTH and last.usage.completion_tokens == 1
        handed, info = last.handed, engine.model_info
        assert handed is not None and (handed.room, handed.tokens, handed.host) == ("7", 16, "127.0.0.1")
        assert (info.role, info.engine_id, info.transfer_port) == ("prefill", handed.engine_id, handed.port)
        plain = [event async for event in await engine.generate(asked())][-1]
        assert isinstance(plain, Finished) and plain.handed is None
        # No engine asks.
        await until(lambda: engine.stats.transfers is not None and engine.stats.transfers.lost == 1)
        assert engine.stats.transfers is not None and engine.stats.transfers.kept == 0


@pytest.mark.parametrize("failure", ["recompute", "refuse"])
async def test_keys_that_do_not_arrive_are_computed_again_or_the_request_is_refused(
    made: EngineConfig, failure: str
) -> None:
    nowhere = TakeOver("127.0.0.1", 1, "r", "e")
    async with started(build_engine(with_role(made, "decode", transfer_failure=failure))) as engine:
        expected = await answer(engine, asked())
        engine.prefixes.flush()
        if failure == "recompute":
            assert await answer(engine, asked(take_over=nowhere)) == expected
        else:
            with pytest.raises(KeysLost, match="did not arrive"):
                await engine.generate(asked(take_over=nowhere))
        assert engine.stats.transfers is not None and engine.stats.transfers.failures["unreachable"] == 1
        engine.prefixes.flush()
        assert engine.stats.host_cache_bytes == 0 and engine.stats.leased_pages == 0


async def test_tokens_in_the_cache_are_not_fetched_again(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, asked())
        assert await answer(decode, asked(take_over=await source_of(prefill, asked()))) == expected
        longer = PROMPT + tuple(range(40, 60))
        source = await source_of(prefill, asked(longer))
        await answer(decode, asked(longer, take_over=source))
        await until(lambda: prefill.stats.transfers is not None and prefill.stats.transfers.kept == 0)
        stats = decode.stats.transfers
        assert stats is not None and stats.taken == 1 and stats.taken_tokens == 16, "of 36 the cache had 20"


async def test_prompts_whose_log_probabilities_are_told_are_computed_here(made: EngineConfig) -> None:
    request = asked(sampling={"prompt_logprobs": 0, "logprobs": True})
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, request)
        decode.prefixes.flush()
        source = await source_of(prefill, asked())
        found = await answer(decode, dataclasses.replace(request, take_over=source))
        assert [token for token, _ in found] == [token for token, _ in expected] and len(found) == len(PROMPT) - 1 + 8
        await until(lambda: prefill.stats.transfers is not None and prefill.stats.transfers.given == 1)
        assert decode.stats.transfers is not None and decode.stats.transfers.taken == 0


async def test_the_client_is_told_what_no_engine_computed(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        for cached in (0, 16):
            source = await source_of(prefill, asked())
            events = [event async for event in await decode.generate(asked(take_over=source))]
            assert isinstance(events[-1], Finished) and events[-1].usage.cached_tokens == cached
            decode.prefixes.flush()
            assert decode.stats.transfers is not None


async def test_other_tenants_prompts_and_salts_find_nothing(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, asked())
        others: list[dict[str, Any]] = [
            {"cache_salt": "other"},
            {"cache_salt": "another tenant\0"},
            {"prompt": (*PROMPT[:-2], 9, 9)},
        ]
        decode.prefixes.flush()
        for number, other in enumerate(others, 1):
            source = await source_of(prefill, asked())
            await answer(decode, asked(**other, take_over=source))
            stats = decode.stats.transfers
            assert stats is not None and stats.failures["gone"] == number and stats.taken == number - 1
            # It is still there for the one that it is for.
            decode.prefixes.flush()
            assert await answer(decode, asked(take_over=source)) == expected
            decode.prefixes.flush()
        assert decode.stats.transfers is not None and decode.stats.transfers.taken == 3


async def test_tenants_have_rooms_of_their_own(made: EngineConfig) -> None:
    """SGLang's gateways of two tenants may draw the same number."""
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, asked())
        decode.prefixes.flush()
        for tenant in ("a", "b"):
            await answer(prefill, asked(cache_salt=f"{tenant}\0", hand_over=HandOver("7")))
        port = prefill.model_info.transfer_port
        for tenant in ("b", "a"):
            found = await answer(decode, asked(cache_salt=f"{tenant}\0", take_over=TakeOver("127.0.0.1", port, "7")))
            assert found == expected
            decode.prefixes.flush()
        assert decode.stats.transfers is not None and decode.stats.transfers.taken == 2


async def test_a_gateway_may_come_from_another_address_to_each_engine(made: EngineConfig) -> None:
    """Callers without names share the machine by their addresses: between two networks a gateway has two."""
    async with pair(made) as (prefill, decode):
        source = await source_of(prefill, asked(tenant="ipv4:10.0.0.1"))
        await answer(decode, asked(tenant="ipv4:127.0.0.1", take_over=source))
        assert decode.stats.transfers is not None and decode.stats.transfers.taken == 1


async def test_keys_that_arrive_behind_a_change_of_weights_are_not_used(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, asked())
        decode.prefixes.flush()
        source, taker = await source_of(prefill, asked()), decode._disagg._taker
        assert taker is not None
        take, kept = taker.take, decode._scheduler.host_cache
        assert kept is not None and kept.taking is not None

        async def late(*given: Any) -> int:
            found = await take(*given)
            decode._scheduler.start_over()
            return found

        taker.take = late  # type: ignore[method-assign]
        assert await answer(decode, asked(take_over=source)) == expected
        stats = decode.stats.transfers
        assert stats is not None and stats.failures["asleep"] == 1 and stats.taken == 0


async def test_an_engine_that_sleeps_fetches_nothing(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, asked())
        source = await source_of(prefill, asked())
        await decode.control.pause()
        await decode.control.sleep()
        asking = asyncio.ensure_future(answer(decode, asked(take_over=source)))
        await until(lambda: (decode.stats.transfers or TransferStats()).failures.get("asleep") == 1)
        await decode.control.wake()
        await decode.control.resume()
        assert await asking == expected
        await prefill.control.pause()
        await prefill.control.sleep()
        await prefill.control.wake()
        await prefill.control.resume()
        await until(lambda: prefill.stats.transfers is not None and prefill.stats.transfers.kept == 0)
        assert await answer(decode, asked(take_over=await source_of(prefill, asked()))) == expected


async def test_a_request_can_be_ended_while_its_keys_are_awaited(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        port = prefill.model_info.transfer_port
        waiting = TakeOver("127.0.0.1", port, "not yet")
        opening = asyncio.ensure_future(decode.generate(asked(take_over=waiting, request_id="x")))
        await until(lambda: "x" in decode._arriving)
        assert decode.abort("x")
        with pytest.raises(RequestAborted):
            await opening
        late = asked(take_over=waiting, deadline=time.monotonic() + 0.2)
        with pytest.raises(DeadlinePassed):
            await decode.generate(late)
        await until(
            lambda: decode._scheduler.host_cache is not None and decode._scheduler.host_cache.stats().nbytes == 0
        )
        assert len(await answer(decode, asked())) == 8


async def test_keys_of_a_request_that_finds_no_room_in_the_queue_are_given_up(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        source = await source_of(prefill, asked())
        room = iter([True, False])
        decode._scheduler.has_room = lambda tenant, count: next(room, True)  # type: ignore[method-assign]
        with pytest.raises(Overloaded, match="queue is full"):
            await decode.generate(asked(take_over=source))
        kept = decode._scheduler.host_cache
        assert kept is not None and kept.stats().nbytes == 0 and kept.taking is not None
        assert len(await answer(decode, asked())) == 8


async def test_host_memory_that_is_full_is_told_and_the_prompt_computed(made: EngineConfig) -> None:
    small = dataclasses.replace(made, memory=dataclasses.replace(made.memory, host_cache_bytes=64, host_cache_chunk=4))
    async with started(build_engine(with_role(made, "prefill"))) as prefill:
        async with started(build_engine(with_role(small, "decode"))) as decode:
            expected = await answer(prefill, asked())
            source = await source_of(prefill, asked())
            assert await answer(decode, asked(take_over=source)) == expected
            assert decode.stats.transfers is not None and decode.stats.transfers.failures["no_room"] == 1
            # The other engine need not keep them.
            await until(lambda: prefill.stats.transfers is not None and prefill.stats.transfers.kept == 0)


async def test_weights_that_differ_are_told_apart(made: EngineConfig) -> None:
    later = dataclasses.replace(made, model=dataclasses.replace(made.model, weight_version="later"))
    async with started(build_engine(with_role(made, "prefill"))) as prefill:
        async with started(build_engine(with_role(later, "decode"))) as decode:
            expected = await answer(prefill, asked())
            assert await answer(decode, asked(take_over=await source_of(prefill, asked()))) == expected
            assert decode.stats.transfers is not None and decode.stats.transfers.failures["mismatch"] == 1


async def test_a_drain_waits_until_keys_were_fetched(made: EngineConfig) -> None:
    async with pair(made) as (prefill, decode):
        expected = await answer(decode, asked())
        decode.prefixes.flush()
        source = await source_of(prefill, asked())
        draining = asyncio.ensure_future(prefill.drain(PATIENCE))
        done, _ = await asyncio.wait([draining], timeout=0.1)
        assert not done
        assert await answer(decode, asked(take_over=source)) == expected
        assert await draining == 0
        assert decode.stats.transfers is not None and decode.stats.transfers.taken == 1


def test_a_role_brings_host_memory_and_excludes_ranks(made: EngineConfig) -> None:
    none = dataclasses.replace(made, memory=dataclasses.replace(made.memory, host_cache_bytes=0))
    assert with_host_memory(none) is none
    assert with_host_memory(with_role(none, "prefill")).memory.host_cache_bytes == LEAST_HOST_BYTES
    assert with_host_memory(with_role(made, "decode")).memory.host_cache_bytes == ROOM
    ranks = dataclasses.replace(made, model=dataclasses.replace(made.model, tensor_parallel=2))
    with pytest.raises(ConfigError, match="tensor_parallel is not possible with role yet"):
        open_ranks(with_role(ranks, "decode"), torch.device("cpu"))
    for wrong in ({"transfer_engine": "pigeon"}, {"transfer_secret_file": "/no/such/file"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            # Before weights are loaded.
            build_engine(with_role(dataclasses.replace(made, model=ModelConfig("/no/model")), "prefill", **wrong))


def test_a_prompt_without_an_encoder_alone_can_be_handed_over(tmp_path: Path) -> None:
    made = config(make_encoder_decoder("t5", tmp_path), ROOMY, room=ROOM, overlap=True, cache="radix")
    told = "role prefill is not possible for this model: rows also hold keys of an encoder"
    with pytest.raises(StartupError, match=told):
        build_engine(with_role(made, "prefill"))


def test_states_that_go_along_are_taken_for_the_prefix_cache(checkpoint_of: Callable[[str], Path]) -> None:
    made = config(checkpoint_of("falcon_h1"), ROOMY, room=ROOM, overlap=True, cache="none")
    with pytest.raises(StartupError, match="role prefill needs prefix_cache radix for this model"):
        build_engine(with_role(made, "prefill"))


def test_claims_are_of_all_that_keys_depend_on() -> None:
    one = claim_of(ids(5), "adapter")
    assert one == claim_of(ids(5), "adapter")
    others = [claim_of(ids(4), "adapter"), claim_of(ids(5, 1), "adapter"), claim_of(ids(5), "")]
    assert len({one, *others}) == 4
