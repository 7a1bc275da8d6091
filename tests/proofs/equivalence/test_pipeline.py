"""An engine whose ranks have some layers each says what an engine of one rank says, token for token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, TIGHT, answers, config, requests
from tests.proofs.equivalence.test_tensor_parallel import LATENTS_AND_STATES, SHARED, alone, tokens


def ranks(made: EngineConfig, size: int = 2) -> EngineConfig:
    return dataclasses.replace(made, model=dataclasses.replace(made.model, pipeline_parallel=size, native="off"))


async def compared(directory: Path, *, overlap: bool, pages: int = ROOMY, room: int = 0, size: int = 2) -> Any:
    asked = requests()
    made = config(directory, pages, room=room, overlap=overlap, cache="radix")
    expected, _ = await answers(alone(config(directory, ROOMY, room=0, overlap=overlap, cache="radix")), asked)
    found, stats = await answers(ranks(made, size), asked)
    assert tokens(found) == tokens(expected)
    for want, got in zip(expected, found, strict=True):
        assert [lp for _, lp in got] == pytest.approx([lp for _, lp in want], abs=1e-3, nan_ok=True)
    assert not any(stats.assert_failures.values())
    return stats


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["overlap", "inline"])
async def test_the_whole_sampling_matrix(checkpoint_of: Callable[[str], Path], overlap: bool) -> None:
    """Penalties, grammars, log probabilities, biases, several outputs: rank 0 samples what comes back."""
    await compared(checkpoint_of("llama"), overlap=overlap)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*SHARED, *LATENTS_AND_STATES])
async def test_families(checkpoint_of: Callable[[str], Path], kind: str) -> None:
    await compared(checkpoint_of(kind), overlap=True)


@pytest.mark.nightly
async def test_retracted_requests_come_back_on_every_rank(checkpoint_of: Callable[[str], Path]) -> None:
    stats = await compared(checkpoint_of("llama"), overlap=True, pages=TIGHT, room=ROOM)
    assert stats.rejoined_requests >= 3
