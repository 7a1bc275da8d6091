"""A prompt that one engine computes and another decodes: the second says what one engine says that does both."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from core.config import DisaggConfig, EngineConfig, LoraConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.types.handover import Handed, HandOver, TakeOver
from core.types.io import Finished, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, Answer, answer, config, requests
from tests.support.engines import started
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

OVERLAPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])


def with_role(made: EngineConfig, role: str, **more: Any) -> EngineConfig:
    return dataclasses.replace(made, disagg=DisaggConfig(role=role, **more))


@asynccontextmanager
async def pair(made: EngineConfig, **more: Any) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine]]:
    async with started(build_engine(with_role(made, "prefill", **more))) as prefill:
        async with started(build_engine(with_role(made, "decode", **more))) as decode:
            yield prefill, decode


async def handed_over(prefill: AsyncEngine, request: GenerateRequest) -> Handed:
    """As a gateway of vLLM's dialect asks: one token, whatever was sampled."""
    once = dataclasses.replace(
        request, sampling=SamplingParams(max_tokens=1, ignore_eos=True), constraint=None, hand_over=HandOver()
    )
    events = [event async for event in await prefill.generate(once)]
    assert isinstance(events[-1], Finished)
    handed = events[-1].handed
    assert handed is not None
    return handed


async def through_both(prefill: AsyncEngine, decode: AsyncEngine, request: GenerateRequest) -> Answer:
    handed = await handed_over(prefill, request)
    source = TakeOver(handed.host, handed.port, handed.room, handed.engine_id)
    return await answer(decode, dataclasses.replace(request, take_over=source))


BY_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed (slipstream[nixl])")


@pytest.mark.parametrize("way", ["tcp", pytest.param("nixl", marks=BY_NIXL)])
@OVERLAPS
@pytest.mark.parametrize("cache", ["radix", "none"])
async def test_tokens_are_those_of_one_engine(
    checkpoint_of: Callable[[str], Path], overlap: bool, cache: str, way: str
) -> None:
    made, asked = config(checkpoint_of("llama"), ROOMY, room=ROOM, overlap=overlap, cache=cache), requests()
    async with started(build_engine(made)) as engine:
        expected = await asyncio.gather(*(answer(engine, request) for request in asked))
    async with pair(made, transfer_engine=way) as (prefill, decode):
        found = await asyncio.gather(*(through_both(prefill, decode, request) for request in asked))
        given, taken = prefill.stats.transfers, decode.stats.transfers
    for want, got in zip(expected, found, strict=True):
        assert [token for token, _ in got] == [token for token, _ in want]
        assert [lp for _, lp in got] == pytest.approx([lp for _, lp in want], abs=1e-4, nan_ok=True)
    assert given is not None and taken is not None
    assert given.kept == 0 and given.given >= len(asked) // 2, given
    assert taken.taken >= len(asked) // 3 and not any(taken.failures.values()), taken
    assert decode.stats.host_cache_bytes == 0 or cache == "radix"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {}),
        ("qwen3_moe", {}),
        ("gemma3_text", {"memory": {"sliding_window_pool": False}}),
        ("gemma3_text", {}),
        ("falcon_h1", {}),
        ("lfm2", {}),
        ("mamba2", {}),
        ("llama", {"model": {"kv_cache_dtype": "int8"}}),
        ("llama", {"speculation": {"method": "ngram"}}),
        ("llama", {"memory": {"page_size": 3}}),
    ],
    ids=[
        "latents",
        "experts",
        "windows without a pool",
        "windows",
        "states",
        "convolutions",
        "states alone",
        "int8",
        "drafts",
        "pages of three",
    ],
)
async def test_what_is_kept_of_tokens_goes_along(
    checkpoint_of: Callable[[str], Path], family: str, changes: dict[str, dict[str, Any]]
) -> None:
    made = config(checkpoint_of(family), ROOMY, room=ROOM, overlap=True, cache="radix")
    for name, values in changes.items():
        made = dataclasses.replace(made, **{name: dataclasses.replace(getattr(made, name), **values)})
    asked = requests()[:14]
    async with started(build_engine(made)) as engine:
        expected = await asyncio.gather(*(answer(engine, request) for request in asked))
    async with pair(made) as (prefill, decode):
        found = await asyncio.gather(*(through_both(prefill, decode, request) for request in asked))
        taken = decode.stats.transfers
    assert [[token for token, _ in each] for each in found] == [[token for token, _ in each] for each in expected]
    assert taken is not None and taken.taken >= 4 and not any(taken.failures.values()), taken


async def test_adapters_have_keys_of_their_own(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint_of("llama")
    lora = LoraConfig(adapters=(("one", str(make_adapter(directory, tmp_path, 3, **ADAPTERS["all"]))),))
    made = dataclasses.replace(config(directory, ROOMY, room=ROOM, overlap=True, cache="radix"), lora=lora)
    asked = [dataclasses.replace(each, adapter="one" if n % 2 else "") for n, each in enumerate(requests()[:8])]
    async with started(build_engine(made)) as engine:
        expected = await asyncio.gather(*(answer(engine, request) for request in asked))
    async with pair(made) as (prefill, decode):
        found = await asyncio.gather(*(through_both(prefill, decode, request) for request in asked))
        assert [[token for token, _ in each] for each in found] == [[token for token, _ in each] for each in expected]
        handed = await handed_over(prefill, asked[1])
        source = TakeOver(handed.host, handed.port, handed.room, handed.engine_id)
        other = dataclasses.replace(asked[1], adapter="", take_over=source)
        plain = dataclasses.replace(asked[1], adapter="")
        decode.prefixes.flush()
        assert await answer(decode, other) == await answer(decode, plain)
        assert decode.stats.transfers is not None and decode.stats.transfers.failures["gone"] == 1
