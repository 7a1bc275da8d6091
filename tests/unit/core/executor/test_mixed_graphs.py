"""Replayed steps with prompt chunks: equal to the same steps launched; their padding, inputs and limits."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.batch.pooling_batch import PoolingBatch
from core.batch.schedule_batch import ForwardMode, InputStaging, ScheduleBatch
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.executor import mixed_graphs
from core.executor.mixed_graphs import MixedGraphs, MixedSize, chunk_tokens, mixed_sizes, why_not_mixed
from core.invariants import InvariantViolation
from core.memory.kv_format import KVFormat
from core.memory.recurrent.state_pool import StateLayerSpec
from core.memory.req_to_token_pool import TableWrites
from core.models.lora.slots import LORA, LoraWrites
from tests.support.fakes.grid_attention import GridAttention, MixedAttention
from tests.support.fakes.traced_graphs import TracedGraph
from tests.unit.core.attention.dense import LAYER
from tests.unit.core.executor.test_decode_graphs import (
    PAGE,
    ROWS,
    SPEC,
    VOCAB,
    WIDTH,
    SumModel,
    World,
    formats,
    greedy,
)

TOKENS = (6, 16)


@dataclass(frozen=True)
class Chunk:
    """`ids` of a prompt, which go to `row`; `final` ends the prompt."""

    row: int
    ids: tuple[int, ...]
    final: bool = True


def mixed_world(streams: DeviceStreams | None = None, **changes: Any) -> World:
    """One whose mixed steps are captured in two sizes."""
    return World(streams, TOKENS, **{"attention": MixedAttention(), **changes})


def graphs_of(world: World) -> MixedGraphs:
    assert world.runner.mixed is not None
    return world.runner.mixed


def mixed(world: World, chunks: list[Chunk], decodes: list[int], **changes: Any) -> ScheduleBatch:
    """A step of `chunks` behind what their rows have, and one token of each of `decodes`."""
    rows = np.array([*(chunk.row for chunk in chunks), *decodes], np.int64)
    extends = np.array([*(len(chunk.ids) for chunk in chunks), *(1 for _ in decodes)], np.int64)
    sampling = [place for place, chunk in enumerate(chunks) if chunk.final] + [*range(len(chunks), len(rows))]
    prefixes = world.lens[rows]
    ends = [first + len(chunk.ids) for first, chunk in zip(prefixes.tolist(), chunks, strict=False)]
    places = [np.arange(first // PAGE, -(-end // PAGE)) for first, end in zip(prefixes.tolist(), ends, strict=False)]
    at = np.concatenate([np.full(len(some), chunk.row) for some, chunk in zip(places, chunks, strict=True)])
    pages = 1 + (at - 1) * (WIDTH // PAGE) + np.concatenate(places)
    fields: dict[str, Any] = {
        "mode": ForwardMode.of(len(chunks), len(decodes)),
        "prefix_lens": prefixes,
        "lower_lens": prefixes[len(chunks) :],
        "extend_lens": extends,
        "num_extend": len(chunks),
        "num_tokens": int(extends.sum()),
        "table_writes": TableWrites(at, np.concatenate(places), pages, PAGE),
        "sample_indices": np.array(sampling, np.int64),
        "sampling": greedy(rows[sampling]),
        "staging": InputStaging(
            torch.tensor([each for chunk in chunks for each in chunk.ids]),
            np.array(decodes, np.int64) if decodes else None,
        ),
        "fresh_rows": np.array([chunk.row for chunk in chunks if world.lens[chunk.row] == 0], np.int64),
    }
    return world.batch(rows.tolist(), **{**fields, **changes})


def run(world: World, chunks: list[Chunk], decodes: list[int]) -> list[int]:
    """The tokens of one such step."""
    world.steps += 1
    batch = mixed(world, chunks, decodes) if chunks else world.batch(decodes)
    result = world.runner.launch(batch).result()
    assert batch.staging.prefill_ids_cpu is None and batch.staging.mix_decode_rows is None
    world.lens[batch.rows] += batch.extend_lens
    return result.tokens.tolist()


def random_step(draw: random.Random, prompts: dict[int, list[int]], lens: np.ndarray) -> tuple[list[Chunk], list[int]]:
    """Chunks of some rows in the middle of their prompts, and decodes of some that are behind it."""
    chunks, room = list[Chunk](), TOKENS[-1]
    for row in draw.sample(sorted(prompts), len(prompts)):
        left = len(prompts[row]) - int(lens[row])
        count = min(draw.choice([1, 2, 5, 9, left]), left, room)
        if len(chunks) < 4 and count > 0:
            ids = prompts[row][lens[row] : lens[row] + count]
            chunks.append(Chunk(row, tuple(ids), count == left))
            room -= count
    ready = [row for row in range(1, ROWS + 1) if 0 < lens[row] < WIDTH and row not in prompts]
    return chunks, draw.sample(ready, draw.randint(0, len(ready)))


def compare_random_steps(world: World, plain: World, steps: int, seed: int) -> None:
    """The same random mixes in two worlds; every token and all state must be equal."""
    draw = random.Random(seed)
    prompts: dict[int, list[int]] = {}
    everyone = list(range(1, ROWS + 1))
    for _ in range(steps):
        for row in everyone:
            if row not in prompts and world.lens[row] in (0, WIDTH) and draw.random() < 0.6:
                prompts[row] = [draw.randrange(VOCAB) for _ in range(draw.randint(1, WIDTH - 2))]
                cached = draw.choice([0, 0, PAGE]) if len(prompts[row]) > PAGE else 0
                for each in (world, plain):
                    share(each, row, cached, len(prompts[row]))
        chunks, decodes = random_step(draw, prompts, world.lens)
        if not chunks and not decodes:
            continue
        told = (chunks, decodes, world.lens.tolist())
        assert run(world, chunks, decodes) == run(plain, chunks, decodes), told
        for chunk in chunks:
            if chunk.final:
                del prompts[chunk.row]
    for mine, theirs in zip(world.state(everyone), plain.state(everyone), strict=True):
        assert torch.equal(mine, theirs)
    assert not world.checks.counters.any() and not world.pool.table[0].any()


def share(world: World, row: int, cached: int, prompt: int) -> None:
    """Give `row` to a new owner, whose first `cached` tokens are those of another row's page.

    Where the rest of its prompt goes, the step itself has to write.
    """
    world.lens[row] = cached
    places = torch.arange(WIDTH, device=world.streams.device) + PAGE
    world.pool.table[row] = places + (row - 1) * WIDTH
    world.pool.table[row, :prompt] = 0
    world.pool.table[row, :cached] = places[:cached] + (row % ROWS) * WIDTH
    world.streams.synchronize()


def test_sizes_are_few_and_hold_what_a_step_may_have() -> None:
    sizes = mixed_sizes(chunk_tokens(512), 256)
    assert len(sizes) == 20 and sizes[0] == (64, 8) and sizes[-1] == (512, 256)
    assert [size.segments for size in mixed_sizes(chunk_tokens(4096), 1)] == [4, 8, 16, 24, 32, 32, 32]
    assert chunk_tokens(100) == (64, 100) and chunk_tokens(4096)[-1] == 1024
    assert {size.rows for size in mixed_sizes((64,), 1000)} == {8, 32, 128, 256}
    assert {size.rows for size in mixed_sizes((64,), 20)} == {8, 20}


@formats
def test_random_mixes_equal_launched_steps(format: KVFormat, seed: int) -> None:
    world, plain = mixed_world(format=format), mixed_world(format=format)
    plain.runner.mixed = plain.runner.graphs = None
    captured = world.model.calls
    compare_random_steps(world, plain, 40, seed)
    assert world.model.calls == captured, "a replay runs no Python of the model"
    assert graphs_of(world).replays > 5


@formats
def test_padding_of_a_mixed_step_touches_slot_0_alone(format: KVFormat) -> None:
    """A full replay, then a small step in the same graph: what the first one had must not be touched."""
    world = mixed_world(format=format)
    run(world, [Chunk(1, (1, 2, 3, 4, 5)), Chunk(2, (6, 7, 8, 9))], [])
    run(world, [Chunk(3, (1, 2, 3)), Chunk(4, (5, 6, 7, 8), final=False)], [1, 2])
    gone = [1, 2, 3]
    before, dump = world.state(gone), world.kv.k(LAYER)[1:PAGE].clone()
    world.kv.k(LAYER)[0] = 77.0
    run(world, [Chunk(4, (9, 9, 9, 9, 9, 9, 9))], [])
    assert graphs_of(world).replays == 3
    assert all(torch.equal(mine, kept) for mine, kept in zip(world.state(gone), before, strict=True))
    assert torch.equal(world.kv.k(LAYER)[1:PAGE], dump) and not (world.kv.k(LAYER)[0] == 77.0).all()
    assert not world.pool.table[0].any() and not world.checks.counters.any()


def test_a_prompt_in_its_middle_publishes_a_length_and_samples_nothing() -> None:
    world = mixed_world()
    world.start([1], [4], 4)
    assert len(run(world, [Chunk(2, (1, 2, 3), final=False), Chunk(3, (5,))], [1])) == 2
    assert world.map.buffer("new_seq_lens_buf")[[1, 2, 3]].tolist() == [5, 3, 1]
    assert graphs_of(world).sample_lens[:2].tolist() == [1, 5]
    assert world.map.buffer("output_tokens_buf")[2] == -1
    assert run(world, [Chunk(2, (4, 5), final=False)], []) == []
    assert graphs_of(world).replays == 2


@formats
def test_a_mixed_step_takes_one_transfer(format: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    world = mixed_world(format=format)
    world.start([1, 2], [4, 5], 4)
    transfers: list[int] = []
    pinned = Staging.pinned

    def counted(self: Staging, ids: Any) -> torch.Tensor:
        transfers.append(len(ids))
        return pinned(self, ids)

    monkeypatch.setattr(Staging, "pinned", counted)
    monkeypatch.setattr(Staging, "upload", lambda *_: pytest.fail("a second transfer"))
    run(world, [Chunk(3, (1, 2, 3), final=False), Chunk(4, (5,))], [1, 2])
    assert len(transfers) == 1


@contextmanager
def outside_replays() -> Iterator[list[str]]:
    """The operations that are dispatched, but for those of replays."""
    seen: list[str] = []
    replay = TracedGraph.replay

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def hidden(self: TracedGraph) -> None:
        count = len(seen)
        replay(self)
        del seen[count:]

    with pytest.MonkeyPatch.context() as patch, Counted():
        patch.setattr(TracedGraph, "replay", hidden)
        yield seen


class DeepModel(SumModel):
    """The same answers from more work: it computes them once for each layer."""

    layers = 1

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.stack([super(DeepModel, self).forward(batch) for _ in range(self.layers)]).amax(0)


@formats
def test_what_is_launched_outside_a_replay_does_not_grow_with_layers(
    format: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.core.executor.test_decode_graphs.SumModel", DeepModel)
    counts: dict[tuple[int, bool], int] = {}
    for layers in (1, 5):
        for captured in (True, False):
            world = mixed_world(layers=layers, format=format)
            if not captured:
                world.runner.mixed = None
            world.start([1, 2], [4, 5], 4)
            with outside_replays() as seen:
                run(world, [Chunk(3, (1, 2, 3), final=False), Chunk(4, (5,))], [1, 2])
            counts[layers, captured] = len(seen)
    print(counts)
    assert counts[1, True] == counts[5, True] < 60
    assert counts[5, False] > counts[1, False] + 60


def test_what_no_graph_has_room_for_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    # What others send along has room of its own, in which a small prompt would find a place.
    for name in ("CARRIED", "LISTED"):
        monkeypatch.setattr(mixed_graphs, name, 0)
    world = mixed_world()
    graphs = graphs_of(world)
    few = [Chunk(1, (1, 2, 3))]
    assert graphs.takes(mixed(world, few, []))
    full, context = Chunk(1, tuple(range(TOKENS[-1]))), np.arange((WIDTH + TOKENS[-1]) // PAGE + 4 + ROWS)
    found = TableWrites(context, context, context, PAGE)
    fresh = np.arange(3 * (4 + ROWS) - 2 * 3)
    assert graphs.takes(mixed(world, [full], [2, 3], table_writes=found, fresh_rows=fresh)), "a prompt that is cached"
    many = np.arange(1 + len(graphs.block.memory))
    refused = [
        world.batch([1, 2]),
        mixed(world, [Chunk(1, tuple(range(TOKENS[-1] + 1)))], []),
        mixed(world, [Chunk(row, (1,)) for row in range(1, 6)], []),
        mixed(world, few, [2], pooling=PoolingBatch((), np.array([1]), np.array([1]))),
        mixed(world, few, [2], encoder_lens=np.array([3])),
        mixed(world, few, [2], companion_writes={LORA: LoraWrites(groups=((1, np.array([0])),))}),
        mixed(world, few, [2], table_writes=TableWrites(many, many, many, PAGE)),
    ]
    assert not any(graphs.takes(batch) for batch in refused)
    wide = MixedGraphs(world.runner.state, [MixedSize(16, 2)], world.runner.graphs)  # type: ignore[arg-type]
    assert wide.takes(mixed(world, few, [2, 3])) and not wide.takes(mixed(world, few, [2, 3, 4]))


def test_a_decode_row_stands_where_it_is_known_to_on_the_device() -> None:
    """The plan knows bounds: a row whose drafts were wrong has fewer tokens than it may have."""
    world, plain = mixed_world(), mixed_world()
    plain.runner.mixed = None
    told = []
    for each in (world, plain):
        each.start([1, 2], [5, 6], 4)
        batch = mixed(each, [Chunk(3, (1, 2))], [1, 2])
        most = batch.prefix_lens + np.array([0, 2, 2])
        batch = dataclasses.replace(batch, prefix_lens=most, lower_lens=each.lens[[1, 2]])
        told.append(each.runner.launch(batch).result().tokens.tolist())
        assert not each.checks.counters.any(), "what was published lies between the bounds"
    assert told[0] == told[1] and graphs_of(world).replays == 1


def test_ids_that_are_not_as_many_as_planned_stay_staged() -> None:
    world = mixed_world()
    batch = mixed(world, [Chunk(1, (1, 2, 3))], [])
    batch.staging.prefill_ids_cpu = torch.tensor([1, 2])
    with pytest.raises(InvariantViolation, match="resolve_length"):
        world.runner.launch(batch)
    assert batch.staging.prefill_ids_cpu is not None


def test_reasons_against_a_capture_of_chunks() -> None:
    assert why_not_mixed(SPEC, MixedAttention()) is None
    assert "chunks" in str(why_not_mixed(SPEC, GridAttention())) and "chunks" in str(why_not_mixed(SPEC, None))
    recurrent = dataclasses.replace(SPEC, state_layers=(StateLayerSpec(0, (), ()),))
    assert "recurrent" in str(why_not_mixed(recurrent, MixedAttention()))
    encoder: Any = object()
    assert "cross" in str(why_not_mixed(dataclasses.replace(SPEC, encoder=encoder), MixedAttention()))


def test_the_log_says_what_was_captured_and_what_was_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        world = mixed_world()
        assert mixed_world(attention=GridAttention()).runner.mixed is None
    assert "captured 2 sizes of steps with up to 16 prompt tokens" in caplog.text
    assert "steps with prompts are not captured: the attention backend plans chunks on the host" in caplog.text
    assert World().runner.mixed is None and world.runner.mixed is not None
