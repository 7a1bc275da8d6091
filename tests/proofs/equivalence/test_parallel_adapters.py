"""Adapters of an engine whose ranks share out the layers that they change: tokens are those of one rank."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import EngineConfig, LoraConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.errors import ModelLoadError
from core.types.io import GenerateRequest
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, TIGHT, Answer, answer, config, requests
from tests.proofs.equivalence.test_tensor_parallel import alone, ranks, tokens
from tests.support.engines import started
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OTHERS = {
    **dict.fromkeys(("qwen3", "gemma2", "cohere2")),
    **dict.fromkeys(("mixtral", "qwen3_moe", "glm4_moe", "qwen3_next"), ATTENTION),
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}
"""By kind: layers that PEFT adapts where it fuses those of experts; None for all kinds of `ADAPTERS`."""
NAMES = ("", "all", "narrow", "later")


def adapted(directory: Path, folder: Path, layers: list[str] | None = None) -> EngineConfig:
    """With two adapters given at start, and a third to be loaded; of `layers` only, if there are any."""
    made, kinds = {}, {"all": ADAPTERS["all"], "narrow": ADAPTERS["narrow"], "later": ADAPTERS["regex"]}
    if layers is not None:
        parts = {"all": layers, "narrow": layers[::2], "later": layers[-1:]}
        kinds = {name: {"r": 2 + len(part), "lora_alpha": 8, "target_modules": part} for name, part in parts.items()}
    for seed, (name, kind) in enumerate(kinds.items()):
        made[name] = make_adapter(directory, folder / name, seed, **kind)
    given = tuple((name, str(made[name])) for name in ("all", "narrow"))
    base = config(directory, ROOMY, room=0, overlap=True, cache="radix")
    return dataclasses.replace(base, lora=LoraConfig(adapters=given, directory=str(folder)))


def asked(names: tuple[str, ...], first: int = 0) -> list[GenerateRequest]:
    """Of one step some requests have an adapter, each another one, and some have none."""
    made = requests()[first : first + 12]
    return [dataclasses.replace(each, adapter=names[n % len(names)]) for n, each in enumerate(made)]


async def said(engine: AsyncEngine, folder: Path) -> list[list[Answer]]:
    async def all_of(requests: list[GenerateRequest]) -> list[Answer]:
        return await asyncio.gather(*(answer(engine, each) for each in requests))

    found = [await all_of(asked(("", "all", "narrow")))]
    await engine.load_adapter("later", "later")
    found.append(await all_of(asked(NAMES, 3)))
    engine.unload_adapter("later")
    # Other weights under the name, while streams of others go on.
    others = asyncio.ensure_future(all_of(asked(("all", ""), 1)))
    await engine.load_adapter("later", "narrow")
    found.append(await all_of(asked(("later", "narrow"))))
    return [*found, await others]


async def compared(made: EngineConfig, folder: Path, size: int = 2, roomy: EngineConfig | None = None) -> None:
    async with started(build_engine(alone(roomy or made))) as engine:
        expected = await said(engine, folder)
    async with started(build_engine(ranks(made, size))) as engine:
        found = await said(engine, folder)
        stats = engine.stats
    for want, got in zip(expected, found, strict=True):
        assert tokens(got) == tokens(want)
    base = [each for each, name in zip(expected[0], ("", "all", "narrow") * 4) if name == ""]
    assert tokens(base) != tokens(expected[0][1::3][: len(base)]), "adapters say something else"
    assert stats.adapters_loaded == 3 and not any(stats.assert_failures.values())


@pytest.mark.nightly
async def test_they_say_what_one_rank_says(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    await compared(adapted(checkpoint_of("llama"), tmp_path), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", OTHERS)
async def test_families(checkpoint_of: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    await compared(adapted(checkpoint_of(kind), tmp_path, OTHERS[kind]), tmp_path)


@pytest.mark.nightly
async def test_retracted_rows_come_back_with_theirs(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    made = adapted(checkpoint_of("llama"), tmp_path)
    memory = dataclasses.replace(made.memory, max_total_tokens=TIGHT * made.memory.page_size, host_cache_bytes=ROOM)
    await compared(dataclasses.replace(made, memory=memory), tmp_path, roomy=made)


@pytest.mark.nightly
def test_layers_that_are_shared_out_in_another_way_are_refused_by_name(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Those of Phi-3 are several in one, which ranks compute whole."""
    directory = checkpoint_of("phi3")
    path = make_adapter(directory, tmp_path, 1, r=2, target_modules=["qkv_proj"])
    made = config(directory, ROOMY, room=0, overlap=True, cache="radix")
    with pytest.raises(ModelLoadError, match=r"qkv_proj, which ranks share out as '.*', and is not adapted"):
        build_engine(ranks(dataclasses.replace(made, lora=LoraConfig(adapters=(("one", str(path)),)))))
