"""Captured decode steps on CUDA, with the kernels that are served there: the checks of the CPU, on real graphs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.device.graphs import CudaGraphs
from core.device.streams import DeviceStreams
from tests.gpu.cuda import ONLY_ON_CUDA, STALL_CYCLES
from tests.proofs.equivalence.encoder_oracle import Seq2SeqOracle
from tests.proofs.equivalence.oracle import decided_examples
from tests.proofs.equivalence.test_captured_families import speaker
from tests.proofs.equivalence.test_decode_graphs import COUNT, LONGEST, OPTIONS, answer, answer_all, graph_engine
from tests.support.checkpoints import make_checkpoint
from tests.support.encoder_decoders import ENCODER_DECODER_CONFIGS
from tests.unit.core.executor.test_captured_companions import (
    CrossWorld,
    RecurrentWorld,
    WindowedWorld,
    both,
    compare_inputs,
    compare_states,
    compare_windows,
)
from tests.unit.core.executor.test_decode_graphs import World, check_padding, compare_changing_batches, graphs_of
from tests.unit.core.executor.test_mixed_graphs import Chunk, compare_random_steps, mixed, mixed_world, run
from tests.unit.core.models.lora.test_row_deltas import adapted_worlds, compare_adapters

pytestmark = ONLY_ON_CUDA

CUDA = torch.device("cuda")


@pytest.fixture
def sync_mode_restored() -> Iterator[None]:
    """Whatever a test does with the sync debug mode ends with it."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_replays_equal_eager_steps() -> None:
    world, plain = World(DeviceStreams(CUDA)), World(DeviceStreams(CUDA))
    plain.runner.graphs = None
    compare_changing_batches(world, plain)
    assert graphs_of(world).replays == 7


@pytest.mark.parametrize(
    ("kind", "compare"),
    [(RecurrentWorld, compare_states), (CrossWorld, compare_inputs), (WindowedWorld, compare_windows)],
)
def test_replays_find_what_rows_keep_beside_keys(kind: Any, compare: Any, seed: int) -> None:
    compare(*both(kind, lambda: DeviceStreams(CUDA)), draw=random.Random(seed), steps=24)


def test_d08_padding_on_the_device() -> None:
    check_padding(World(DeviceStreams(CUDA)))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_replayed_step_waits_for_nothing(sync_mode_restored: None) -> None:
    world = World(DeviceStreams(CUDA))
    world.start([1, 2, 3], [1, 2, 3], 4)
    world.step([1, 2, 3])
    torch.cuda.set_sync_debug_mode("error")
    launched = world.runner.launch(world.batch([1, 2, 3]))
    torch.cuda.set_sync_debug_mode("default")
    assert len(launched.result().tokens) == 3


def test_inputs_may_be_sent_while_the_last_replay_still_runs() -> None:
    """The static block is filled again at once; stream order alone keeps the replay before it whole."""
    world, plain = World(DeviceStreams(CUDA)), World(DeviceStreams(CUDA))
    plain.runner.graphs = None
    for each in (world, plain):
        each.start([1, 2, 3, 4], [3, 5, 7, 9], 4)
    batches, launched = [[1, 2, 3], [4], [3, 1]], []
    with world.streams.on_forward():
        torch.cuda._sleep(STALL_CYCLES)
    for rows in batches:
        launched.append(world.runner.launch(world.batch(rows)))
        world.lens[rows] += 1
    assert [step.result().tokens.tolist() for step in launched] == [plain.step(rows) for rows in batches]


def test_work_that_waits_for_the_device_is_refused_and_leaves_it_usable() -> None:
    streams = DeviceStreams(CUDA)
    values = torch.ones(4, device=CUDA)
    streams.synchronize()
    with streams.on_forward(), pytest.raises(RuntimeError):
        CudaGraphs(streams.forward).capture(lambda: print(values.max().item()))
    streams.synchronize()
    assert values.sum().item() == 4


def test_replayed_prompts_equal_launched_ones(seed: int) -> None:
    world, plain = mixed_world(DeviceStreams(CUDA)), mixed_world(DeviceStreams(CUDA))
    plain.runner.mixed = plain.runner.graphs = None
    compare_random_steps(world, plain, 40, seed)
    assert world.runner.mixed is not None and world.runner.mixed.replays > 5


def test_a_replayed_step_with_prompts_waits_for_nothing(sync_mode_restored: None) -> None:
    world = mixed_world(DeviceStreams(CUDA))
    world.start([1, 2], [1, 2], 4)
    chunks = [Chunk(3, (1, 2, 3), final=False), Chunk(4, (5,))]
    run(world, chunks, [1, 2])
    torch.cuda.set_sync_debug_mode("error")
    launched = world.runner.launch(mixed(world, [Chunk(3, (7, 7))], [1, 2]))
    torch.cuda.set_sync_debug_mode("default")
    assert len(launched.result().tokens) == 3
    assert world.runner.mixed is not None and world.runner.mixed.replays == 2


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("overlap", [True, False])
async def test_greedy_equals_transformers(
    kind: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(kind, tmp_path, seed=0)
    examples = decided_examples(directory, COUNT, LONGEST, seed=2)
    streams = DeviceStreams(CUDA)
    async with graph_engine(directory, monkeypatch, overlap=overlap, streams=streams) as (engine, _, runner):
        await answer_all(engine, examples)
        # PyTorch's grouped product of float32 waits for the device: such mixtures are launched, and a log line says so.
        captured = kind in ("llama", "gemma3_text")
        assert (runner.graphs is not None) == captured and (runner.mixed is not None) == captured
        if runner.graphs is not None and runner.mixed is not None:
            assert runner.graphs.replays > 0, "decode steps were captured"
            assert runner.mixed.replays > 0, "and steps with prompts"


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
async def test_mixtures_are_captured_in_the_dtype_that_they_are_served_in(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(kind, tmp_path, seed=0)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    async with graph_engine(directory, monkeypatch, overlap=True, streams=DeviceStreams(CUDA)) as (engine, _, runner):
        crowds = [await asyncio.gather(*(answer(engine, (5 + i, 9, 4)) for i in range(COUNT))) for _ in range(2)]
        assert runner.graphs is not None and runner.graphs.replays > 0, "decode steps were captured"
        assert runner.mixed is not None and runner.mixed.replays > 0, "and steps with prompts"
        assert sum(engine.stats.assert_failures.values()) == 0
    assert crowds[0] == crowds[1] and len({tokens for tokens, _ in crowds[0]}) > 1


@pytest.mark.parametrize("kind", ["bamba", "jamba", "qwen3_next", "lfm2", "bart", "t5"])
async def test_models_that_keep_more_than_keys_equal_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that PyTorch's own kernels compute: others may wait for the device there, and say so in the log."""
    if kind in ENCODER_DECODER_CONFIGS:
        directory = speaker(kind, tmp_path)
        examples = Seq2SeqOracle(directory).decided(COUNT, LONGEST, seed=1)
    else:
        directory = make_checkpoint(kind, tmp_path, seed=0)
        examples = decided_examples(directory, COUNT, LONGEST, seed=2)
    streams = DeviceStreams(CUDA)
    async with graph_engine(directory, monkeypatch, overlap=True, streams=streams) as (engine, _, runner):
        await answer_all(engine, examples)
        assert runner.graphs is not None and runner.graphs.replays > 0, "decode steps were captured"


def test_replays_have_the_adapters_of_their_rows() -> None:
    compare_adapters(*adapted_worlds(lambda: DeviceStreams(CUDA)))


async def test_sampling_options_are_the_same_beside_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint("llama", tmp_path, seed=0)
    outcomes = []
    for captured in (True, False):
        streams = DeviceStreams(CUDA)
        async with graph_engine(directory, monkeypatch, overlap=True, tokens=1024, streams=streams) as (
            engine,
            _,
            runner,
        ):
            if not captured:
                runner.graphs = None
            asked = [answer(engine, (5 + i, 9, 4), **options) for i, options in enumerate(OPTIONS)]
            outcomes.append(await asyncio.gather(*asked))
    assert [tokens for tokens, _ in outcomes[0]] == [tokens for tokens, _ in outcomes[1]]
