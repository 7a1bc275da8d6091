"""Captured decode steps of two ranks give the tokens of one: each rank replays its own graphs, collectives among them.

The graphs are those of `tests/support/fakes/traced_graphs.py`, on both ranks, over gloo.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig
from core.distributed.meeting import Meeting
from core.engine import build, rank_follower, ranks
from core.engine.rank_follower import be_started
from tests.proofs.equivalence.test_rejoining import ROOMY, answers, config, requests
from tests.proofs.equivalence.test_tensor_parallel import alone, one_rank_says, tokens
from tests.proofs.equivalence.test_tensor_parallel import ranks as shared_out
from tests.support.fakes.masked_attention import MaskedAttention
from tests.support.fakes.traced_graphs import GraphStreams

TOLD = "SLIPSTREAM_TEST_REPLAYS"
"""Names the file in which the second rank tells how often it has replayed a step."""


def be_captured(config: EngineConfig, rank: int, meeting: Meeting) -> None:
    """Be that rank, in a process of its own, with graphs."""
    made: Any = rank_follower
    streams = GraphStreams()
    made.DeviceStreams = lambda _: streams
    made.build_attention = lambda *_: MaskedAttention()
    be_started(config, rank, meeting)
    Path(os.environ[TOLD]).write_text(str(replays(streams)))


def replays(streams: GraphStreams) -> int:
    return 0 if streams.graphs is None else sum(graph.replays for graph in streams.graphs.made)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
async def test_replayed_steps_of_two_ranks_are_those_of_one(
    checkpoint_of: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory, asked = checkpoint_of(kind), requests()[::2]
    one = alone(config(directory, ROOMY, room=0, overlap=True, cache="radix"))
    expected, _ = await answers(one, asked)
    streams, told = GraphStreams(), tmp_path / "replays"
    monkeypatch.setenv(TOLD, str(told))
    monkeypatch.setattr(ranks, "be_started", be_captured)
    monkeypatch.setattr(build, "DeviceStreams", lambda _: streams)
    monkeypatch.setattr(build, "build_attention", lambda *_: MaskedAttention())
    found, stats = await answers(shared_out(config(directory, ROOMY, room=0, overlap=True, cache="radix")), asked)
    shorter = dataclasses.replace(one, scheduler=dataclasses.replace(one.scheduler, chunked_prefill_size=8))
    assert tokens(found) == tokens(await one_rank_says(expected, found, shorter, asked))
    assert not any(stats.assert_failures.values())
    assert replays(streams) == int(told.read_text()) > 20
