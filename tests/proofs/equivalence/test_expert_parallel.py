"""Engines that share experts say what an engine which has them all says, token for token, whatever the others do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import EngineConfig
from core.engine.async_engine import AsyncEngine
from core.types.stats import EngineStats
from tests.proofs.equivalence.test_rejoining import ROOMY, Answer, answer, answers, config, requests
from tests.proofs.equivalence.test_tensor_parallel import alone, tokens
from tests.support.joint_engines import JointEngine, joint_engines

KINDS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_next", "gpt_oss")


async def answered(engine: AsyncEngine, first: int, step: int) -> tuple[list[Answer], EngineStats]:
    """What `engine` says to every `step`-th of the requests from `first` on."""
    found = await asyncio.gather(*(answer(engine, each) for each in requests()[first::step]))
    return found, engine.stats


def made(directory: Path, pages: int = ROOMY, room: int = 0) -> EngineConfig:
    return config(directory, pages, room=room, overlap=True, cache="radix")


def check(engine: JointEngine, expected: list[Answer]) -> EngineStats:
    found, stats = engine.end()
    assert tokens(found) == tokens(expected)
    for want, got in zip(expected, found, strict=True):
        assert [lp for _, lp in got] == pytest.approx([lp for _, lp in want], abs=1e-3, nan_ok=True)
    assert not any(stats.assert_failures.values())
    return stats


@pytest.mark.nightly
async def test_the_whole_sampling_matrix(checkpoint_of: Callable[[str], Path]) -> None:
    """Of two engines: first one has all requests, then the other, then each has half of them."""
    directory = checkpoint_of("qwen3_moe")
    expected, _ = await answers(alone(made(directory)), requests())
    with joint_engines(made(directory), made(directory)) as (one, other):
        other.begin(answered, 0, 1)
        check(other, expected)
        one.begin(answered, 0, 1)
        check(one, expected)
        one.begin(answered, 0, 2)
        other.begin(answered, 1, 2)
        check(one, expected[::2])
        check(other, expected[1::2])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
async def test_models(checkpoint_of: Callable[[str], Path], kind: str) -> None:
    directory = checkpoint_of(kind)
    expected, _ = await answers(alone(made(directory)), requests())
    with joint_engines(made(directory), made(directory)) as (one, other):
        one.begin(answered, 0, 1)
        check(one, expected)
        one.begin(answered, 0, 2)
        other.begin(answered, 1, 2)
        check(one, expected[::2])
        check(other, expected[1::2])


async def test_some_of_each_say_what_one_says(checkpoint_of: Callable[[str], Path]) -> None:
    """What runs in every run of CI: each engine has a few requests, of several kinds, and one of them more than one."""
    directory = checkpoint_of("qwen3_moe")
    expected, _ = await answers(alone(made(directory)), requests()[::5])
    with joint_engines(made(directory), made(directory)) as (one, other):
        one.begin(answered, 0, 10)
        other.begin(answered, 5, 10)
        check(one, expected[::2])
        check(other, expected[1::2])
