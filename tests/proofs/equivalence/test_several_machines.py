"""An engine whose ranks are on two machines says what an engine of one process says; or two meet at loopback here."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig, NodesConfig
from core.engine.build import build_engine
from core.engine.ranks import follow_leader
from core.errors import StartupError
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, TIGHT, answers, config, requests
from tests.proofs.equivalence.test_tensor_parallel import alone, ranks, tokens
from tests.support.ports import free_port


def placed(made: EngineConfig, node: int, port: int) -> EngineConfig:
    return dataclasses.replace(made, nodes=NodesConfig(2, node, master_port=port, join_timeout=60.0))


def piped(made: EngineConfig) -> EngineConfig:
    model = dataclasses.replace(made.model, tensor_parallel=1, pipeline_parallel=2, native="off")
    return dataclasses.replace(made, model=model)


def _machine(made: EngineConfig, told: Any) -> None:
    met = list[bool]()
    try:
        told.send((follow_leader(made, lambda: met.append(True)), met))
    except StartupError as error:
        told.send((str(error), met))


@contextmanager
def machine(made: EngineConfig) -> Iterator[Any]:
    """Another machine; what comes out of it is how it ended."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_machine, args=(made, theirs))
    process.start()
    try:
        yield ours
    finally:
        process.join(20)
        process.kill()


async def compared(directory: Path, share: Callable[[EngineConfig], EngineConfig], each: int = 1) -> None:
    """`each`: of how many requests of the matrix one is asked."""
    asked, port = requests()[::each], free_port()
    plain = config(directory, ROOMY, room=0, overlap=True, cache="radix")
    expected, _ = await answers(alone(plain), asked)
    made = share(config(directory, TIGHT, room=ROOM, overlap=True, cache="radix"))
    with machine(placed(made, 1, port)) as second:
        found, stats = await answers(placed(made, 0, port), asked)
        assert tokens(found) == tokens(expected) and not any(stats.assert_failures.values())
        assert second.poll(20) and second.recv() == (True, [True]), "told by the first one that this is all"


async def test_tokens_are_those_of_one_process(checkpoint_of: Callable[[str], Path]) -> None:
    await compared(checkpoint_of("llama"), ranks, each=6)


@pytest.mark.nightly
async def test_several_ranks_on_each(checkpoint_of: Callable[[str], Path]) -> None:
    await compared(checkpoint_of("deepseek_v3"), lambda made: ranks(made, 4))


@pytest.mark.nightly
async def test_pipelines(checkpoint_of: Callable[[str], Path]) -> None:
    await compared(checkpoint_of("llama"), piped)


@pytest.mark.nightly
async def test_machines_with_other_settings_say_which(checkpoint_of: Callable[[str], Path]) -> None:
    made, port = ranks(config(checkpoint_of("llama"), ROOMY, room=0, overlap=True, cache="radix")), free_port()
    other = dataclasses.replace(made, memory=dataclasses.replace(made.memory, page_size=8))
    with machine(placed(other, 1, port)) as second:
        with pytest.raises(StartupError, match=r"page_size 8 at rank 1 at 127.0.0.1, and 4 at rank 0$"):
            build_engine(placed(made, 0, port))
        assert second.poll(20)
        assert second.recv()[0].endswith("page_size 4 at rank 0 at 127.0.0.1, and 8 at rank 1")
