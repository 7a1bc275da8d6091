"""Captured decode steps of two ranks give the tokens of one: each rank replays its own graphs, collectives among them.

The graphs are those of `tests/support/fakes/traced_graphs.py`, on both ranks, over gloo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig
from core.distributed.meeting import Meeting
from core.engine import build, rank_follower, ranks
from core.engine.rank_follower import be_started
from core.executor.step import StepRunner
from tests.proofs.equivalence.test_rejoining import ROOMY, answers, config, requests
from tests.proofs.equivalence.test_tensor_parallel import alone, one_rank_says, tokens
from tests.proofs.equivalence.test_tensor_parallel import ranks as shared_out
from tests.support.fakes.masked_attention import MaskedAttention
from tests.support.fakes.traced_graphs import GraphStreams


def be_captured(config: EngineConfig, rank: int, meeting: Meeting) -> None:
    """Be that rank, in a process of its own, with graphs."""
    made: Any = rank_follower
    made.DeviceStreams = lambda _: GraphStreams()
    made.build_attention = lambda *_: MaskedAttention()
    be_started(config, rank, meeting)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
async def test_replayed_steps_of_two_ranks_are_those_of_one(
    checkpoint_of: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, asked = checkpoint_of(kind), requests()[::2]
    one = alone(config(directory, ROOMY, room=0, overlap=True, cache="radix"))
    expected, _ = await answers(one, asked)
    runners, plain, used = list[StepRunner](), build._build_runner, list[GraphStreams]()

    def kept(*args: Any) -> StepRunner:
        runners.append(plain(*args))
        return runners[-1]

    def streams(_: Any) -> GraphStreams:
        used.append(GraphStreams())
        return used[-1]

    monkeypatch.setattr(ranks, "be_started", be_captured)
    monkeypatch.setattr(build, "_build_runner", kept)
    monkeypatch.setattr(build, "DeviceStreams", streams)
    monkeypatch.setattr(build, "build_attention", lambda *_: MaskedAttention())
    found, stats = await answers(shared_out(config(directory, ROOMY, room=0, overlap=True, cache="radix")), asked)
    shorter = dataclasses.replace(one, scheduler=dataclasses.replace(one.scheduler, chunked_prefill_size=8))
    assert tokens(found) == tokens(await one_rank_says(expected, found, shorter, asked))
    assert not any(stats.assert_failures.values())
    (each,) = used
    assert each.graphs is not None and sum(graph.replays for graph in each.graphs.made) > 20
