"""Drafts of an engine of two ranks: rank 0 makes them, all compute them, and no output differs from one rank's."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig, LoraConfig, SpeculationConfig
from core.engine import build
from core.engine.build import build_engine
from core.errors import EngineDead
from core.types.constraint import Constraint, ConstraintKind
from core.types.io import GenerateRequest
from core.types.sampling_params import SamplingParams
from core.types.stats import EngineStats
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, TIGHT, Answer, answer, config, requests
from tests.proofs.equivalence.test_tensor_parallel import LATENTS_AND_STATES, SHARED, alone, ranks, tokens
from tests.support.engines import started
from tests.support.fakes.fixed_depth import FixedDepth
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

MOST = 3


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever drafts cost here: the tests are of outputs."""
    monkeypatch.setattr(build, "AdaptiveDepth", lambda most, _: FixedDepth(most))


def drafting(made: EngineConfig) -> EngineConfig:
    return dataclasses.replace(made, speculation=SpeculationConfig("ngram", max_drafts=MOST))


def asked(seed: int = 5) -> list[GenerateRequest]:
    """The sampling matrix, and prompts that repeat themselves, which outputs do as well: drafts are right there."""
    rng, found = random.Random(seed), requests(seed)[::2]
    for place in range(6):
        part = [rng.randrange(3, 90) for _ in range(4)]
        rule = Constraint(ConstraintKind.REGEX, "(ab){40}") if place % 3 == 2 else None
        bias = dict.fromkeys(part, 6.0)
        sampling = SamplingParams(temperature=0.0, ignore_eos=rule is None, max_tokens=50, logit_bias=bias)
        found.append(GenerateRequest(token_ids=(*part * 4, place), sampling=sampling, constraint=rule, want_text=False))
    return found


async def said(made: EngineConfig) -> tuple[list[Answer], EngineStats]:
    wanted = asked()
    if made.lora.adapters:
        wanted = [dataclasses.replace(each, adapter="one") if n % 3 == 0 else each for n, each in enumerate(wanted)]
    async with started(build_engine(made)) as engine:
        try:
            found = await asyncio.gather(*(answer(engine, request) for request in wanted))
        except EngineDead as error:
            pytest.fail(f"the ranks came apart: {error}")
        return found, engine.stats


async def compared(
    directory: Path, *, overlap: bool = True, pages: int = ROOMY, room: int = 0, adapter: Path | None = None
) -> EngineStats:
    same: dict[str, Any] = {"overlap": overlap, "cache": "radix"}
    lora = LoraConfig(adapters=() if adapter is None else (("one", str(adapter)),))
    roomy, made = config(directory, ROOMY, room=0, **same), config(directory, pages, room=room, **same)
    expected, _ = await said(dataclasses.replace(alone(roomy), lora=lora))
    found, stats = await said(dataclasses.replace(drafting(ranks(made)), lora=lora))
    assert tokens(found) == tokens(expected)
    for want, got in zip(expected, found, strict=True):
        assert [lp for _, lp in got] == pytest.approx([lp for _, lp in want], abs=1e-3, nan_ok=True)
    assert not any(stats.assert_failures.values())
    assert stats.drafts is not None
    right, wrong = (
        sum(n * count for n, count in enumerate(each)) for each in (stats.drafts.right, stats.drafts.proposed)
    )
    assert right > 20 and wrong > right, stats.drafts
    return stats


async def test_tokens_are_those_of_one_rank(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """With an adapter for a third of the requests, too."""
    directory = checkpoint_of("llama")
    await compared(directory, adapter=make_adapter(directory, tmp_path, 3, **ADAPTERS["all"]))


@pytest.mark.nightly
async def test_without_overlap(checkpoint_of: Callable[[str], Path]) -> None:
    await compared(checkpoint_of("llama"), overlap=False)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*SHARED, *LATENTS_AND_STATES])
async def test_families(checkpoint_of: Callable[[str], Path], kind: str) -> None:
    await compared(checkpoint_of(kind))


@pytest.mark.nightly
async def test_retracted_rows_come_back_on_every_rank(checkpoint_of: Callable[[str], Path]) -> None:
    stats = await compared(checkpoint_of("llama"), pages=TIGHT, room=ROOM)
    assert stats.preemptions >= 3
