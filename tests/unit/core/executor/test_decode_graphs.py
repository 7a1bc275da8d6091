"""What a replay writes, what padding touches, which steps are left to eager code, and that a capture may be refused."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.sampling_batch import SamplingBatch
from core.batch.schedule_batch import ForwardMode, InputStaging, ScheduleBatch
from core.batch.vision_batch import VisionBatch
from core.device.checks import AssertMode, DeviceChecks
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.executor.decode_graphs import COARSE_FROM, LARGEST, DecodeGraphs, graph_sizes, why_not
from core.executor.device_state import DeviceState
from core.executor.step import StepRunner
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.kv_formats import KV_FORMATS
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.req_to_token_pool import ReqToTokenPool, TableWrites
from core.models.base import ModelSpec
from core.models.lora.slots import LORA, LoraWrites
from core.relay.future_map import FutureMap
from core.relay.payload import RelayPayload
from core.sampling.sampler import Sampler
from core.types.arrays import Ints
from tests.support.fakes.masked_attention import MaskedAttention
from tests.support.fakes.traced_graphs import CaptureError, GraphStreams, TracedGraphs
from tests.unit.core.attention.dense import LAYER

VOCAB, ROWS, PAGE, WIDTH = 23, 8, 4, 16
SPEC = ModelSpec("sum", "Sum", VOCAB, WIDTH, torch.float32, (KVLayerSpec(LAYER, 1, 2, 2),), capturable=True)


formats = pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)


class SumModel:
    """Attends once over one layer, and answers with the token that its input, its past and its position add up to."""

    def __init__(self) -> None:
        self.spec = SPEC
        self.attention = MaskedAttention()
        self.sync = False
        self.calls = 0

    def bind(self, *_: Any) -> None:
        """Bound from the start."""

    def forward(self, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.sync:
            batch.input_ids.max().item()
        total = self.total(batch) % VOCAB
        return torch.nn.functional.one_hot(total.index_select(0, batch.last_indices), VOCAB).float()

    def total(self, batch: Any) -> torch.Tensor:
        """int64[T], by token: what its answer is found from."""
        self.attention.plan(batch)
        ids = batch.input_ids.float()
        packed = torch.stack([ids, torch.ones_like(ids)], dim=-1)[None]
        seen = self.attention.forward(LAYER, torch.zeros_like(packed), packed, packed, scale=1.0)
        return (seen[:, 0, 0] * (batch.positions + 1)).round().long() + batch.positions


class World:
    """A runner around SumModel whose decode steps are captured in sizes 1, 2, 4 and 8; rows are 1 to 8, in order."""

    verification: Any = None
    """See `DeviceState`."""

    def __init__(
        self,
        streams: DeviceStreams | None = None,
        tokens: tuple[int, ...] = (),
        format: KVFormat = PLAIN,
        **changes: Any,
    ) -> None:
        """`tokens`: of the steps with prompts that are captured, if the attention can be."""
        self.streams = streams or GraphStreams()
        device = self.streams.device
        self.pool = ReqToTokenPool(ROWS, WIDTH, device)
        self.kv = KVPool(SPEC.kv_layers, ROWS * WIDTH // PAGE, PAGE, torch.float32, device, format=format)
        self.checks = DeviceChecks(AssertMode.COUNT, device)
        self.map = FutureMap(self.pool, self.streams, self.checks)
        self.model, companions = self.made()
        for name, value in changes.items():
            setattr(self.model, name, value)
        state = DeviceState(
            pool=self.pool,
            kv_pool=self.kv,
            future_map=self.map,
            checks=self.checks,
            streams=self.streams,
            staging=Staging(device),
            model=self.model,  # type: ignore[arg-type]
            sampler=Sampler(VOCAB, device),
            companions=companions,
            attention=self.model.attention,
            verification=self.verification,
            graph_sizes=graph_sizes(ROWS),
            graph_tokens=tokens,
        )
        self.runner = StepRunner(state)
        self.lens = np.zeros(ROWS + 1, np.int64)
        self.steps = 0

    def made(self) -> tuple[SumModel, dict[str, Any]]:
        """The model, and by name the pools that it keeps beside the keys."""
        return SumModel(), {}

    def start(self, rows: list[int], tokens: list[int], length: int) -> None:
        """As if `rows` had prompts of `length` tokens in the pools and had sampled `tokens`."""
        device = self.streams.device
        at = torch.tensor(rows, device=device)
        self.lens[rows] = length
        self.map.publish(at, torch.tensor(self.lens[rows], device=device))
        self.map.stash(at, RelayPayload(torch.tensor(tokens, device=device)))
        for row in rows:
            self.pool.table[row] = torch.arange(WIDTH, device=device) + PAGE + (row - 1) * WIDTH
            slots = self.pool.table[row, :length].long()
            told = torch.full((length, 1, 2), float(row), device=device)
            self.kv.write(LAYER, slots, told, told)
        self.streams.synchronize()

    def batch(self, rows: list[int], **changes: Any) -> ScheduleBatch:
        at = np.array(rows, np.int64)
        fields: dict[str, Any] = {
            "step_id": self.steps,
            "mode": ForwardMode.DECODE,
            "rows": at,
            "generations": np.ones_like(at),
            "prefix_lens": self.lens[at],
            "lower_lens": self.lens[at],
            "extend_lens": np.ones_like(at),
            "num_extend": 0,
            "num_tokens": len(at),
            "table_writes": TableWrites.empty(PAGE),
            "sample_indices": np.arange(len(at)),
            "sampling": greedy(at),
            "staging": InputStaging(),
            "fresh_rows": np.empty(0, np.int64),
        }
        return ScheduleBatch(**{**fields, **changes})

    def step(self, rows: list[int], **changes: Any) -> list[int]:
        """Decode one token of each of `rows`."""
        self.steps += 1
        result = self.runner.launch(self.batch(rows, **changes)).result()
        self.lens[rows] += 1
        return result.tokens.tolist()

    def state(self, rows: list[int]) -> list[torch.Tensor]:
        """Copies of everything that belongs to `rows`, on the host."""
        self.streams.synchronize()
        slots = self.pool.table[rows].long().view(-1)
        stored = (self.kv.k(LAYER), self.kv.v(LAYER), self.kv.k_scales(LAYER), self.kv.v_scales(LAYER))
        held = [each[slots] for each in stored if each is not None] + [self.pool.table[rows]]
        held += [self.map.buffer(name)[rows] for name in ("output_tokens_buf", "new_seq_lens_buf")]
        return [each.cpu() for each in held]


def greedy(rows: Ints) -> SamplingBatch:
    count, none = len(rows), np.empty(0, np.int64)
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    ints = np.zeros(count, np.int64)
    arrays = (rows, zeros, ints, ones, zeros, np.zeros((count, 1)), ones, zeros, zeros, ints, ints, ints)
    return SamplingBatch(*arrays, none, none, zeros[:0], none, none, True, False, False, False, False, False, 0)


def graphs_of(world: World) -> DecodeGraphs:
    assert world.runner.graphs is not None
    return world.runner.graphs


def test_sizes_are_fine_then_coarse_and_hold_everybody() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(256)[:6] == (1, 2, 4, 8, 16, 24) and graph_sizes(256)[-1] == COARSE_FROM
    assert graph_sizes(10_000)[-1] == LARGEST


def compare_changing_batches(world: World, plain: World) -> None:
    """The same decode steps in two worlds, of sizes up and down; every token and all state must be equal."""
    for each in (world, plain):
        each.start(list(range(1, 9)), [3, 5, 7, 9, 11, 13, 15, 17], 4)
    for rows in ([1], [2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [8, 6, 1], [5], [7, 2], [4, 3, 2, 1, 8]):
        assert world.step(rows) == plain.step(rows)
    for mine, theirs in zip(world.state(list(range(1, 9))), plain.state(list(range(1, 9))), strict=True):
        assert torch.equal(mine, theirs)


def check_padding(world: World) -> None:
    """SGLang #26292: a full replay of 8, then 5 real rows in the same graph; the 3 that left must not be touched."""
    world.start(list(range(1, 9)), list(range(1, 9)), 4)
    world.step(list(range(1, 9)))
    gone = [6, 7, 8]
    before, dump = world.state(gone), world.kv.k(LAYER)[1:PAGE].clone()
    world.kv.k(LAYER)[0] = 77.0
    world.streams.synchronize()
    world.step([1, 2, 3, 4, 5])
    assert all(torch.equal(mine, kept) for mine, kept in zip(world.state(gone), before, strict=True))
    assert torch.equal(world.kv.k(LAYER)[1:PAGE], dump), "padding writes slot 0 of its page only"
    assert not (world.kv.k(LAYER)[0] == 77.0).all(), "and that it does write"
    assert not world.pool.table[0].any()
    assert not any(world.map.buffer(name)[0] for name in ("output_tokens_buf", "new_seq_lens_buf"))
    assert not world.checks.counters.any()


@formats
def test_replays_equal_eager_steps_in_batches_that_grow_and_shrink(format: KVFormat) -> None:
    world, plain = World(format=format), World(format=format)
    plain.runner.graphs = None
    captured = world.model.calls
    compare_changing_batches(world, plain)
    assert world.model.calls == captured, "a replay runs no Python of the model"
    assert graphs_of(world).replays == 7 and plain.model.calls == captured + 7


@formats
def test_d08_padded_rows_write_slot_0_and_nothing_of_rows_that_left(format: KVFormat) -> None:
    check_padding(World(format=format))


@formats
def test_a_step_takes_one_transfer(format: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(format=format)
    world.start([1, 2, 3], [1, 2, 3], 4)
    transfers: list[int] = []
    plain = Staging.pinned

    def counted(self: Staging, ids: Any) -> torch.Tensor:
        transfers.append(len(ids))
        return plain(self, ids)

    monkeypatch.setattr(Staging, "pinned", counted)
    monkeypatch.setattr(Staging, "upload", lambda *_: pytest.fail("a second transfer"))
    world.step([1, 2, 3])
    assert len(transfers) == 1


def test_what_is_not_a_captured_decode_step_runs_eagerly() -> None:
    world = World()
    graphs = graphs_of(world)
    rows = [1, 2, 3]
    assert graphs.takes(world.batch(rows))
    many = np.arange(1 + len(graphs.block.memory))
    refused = [
        world.batch(rows, mode=ForwardMode.MIXED),
        world.batch(rows, mode=ForwardMode.EXTEND),
        world.batch(rows, companion_writes={LORA: LoraWrites(groups=((1, np.array([0])),))}),
        world.batch(rows, table_writes=TableWrites(many, many, many, PAGE)),
        world.batch([*range(1, ROWS + 1), 1]),
    ]
    assert not any(graphs.takes(batch) for batch in refused)


def test_rows_behind_images_run_eagerly() -> None:
    """A graph has their usual positions."""
    world = World()
    world.start([1, 2], [3, 4], 5)
    before = world.model.calls
    world.step([1, 2])
    assert world.model.calls == before, "it was replayed"
    world.step([1, 2], vision=VisionBatch((), None, np.array([0, -3])))
    assert world.model.calls == before + 1


def test_the_inputs_of_a_new_page_and_a_new_owner_come_with_the_step() -> None:
    world = World()
    world.start([1, 2], [4, 5], 4)
    world.pool.table[2, 4:] = 0
    writes = TableWrites(np.array([2]), np.array([4 // PAGE]), np.array([9]), PAGE)
    world.runner.launch(world.batch([1, 2], table_writes=writes, fresh_rows=np.array([3]))).result()
    assert world.pool.table[2, 4 : 4 + PAGE].tolist() == list(range(9 * PAGE, 10 * PAGE))
    assert world.map.buffer("output_tokens_buf")[3] == -1


def test_a_model_that_looks_at_the_device_is_served_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        world = World(sync=True)
    assert world.runner.graphs is None
    assert "not captured" in caplog.text and "not permitted" in caplog.text
    world.start([1], [4], 4)
    assert len(world.step([1])) == 1


def test_reasons_against_a_capture() -> None:
    eager = MaskedAttention()
    assert why_not(SPEC, eager) is None
    assert "host" in str(why_not(SPEC, None))
    assert "promise" in str(why_not(dataclasses.replace(SPEC, capturable=False), eager))


def test_the_stand_in_keeps_what_the_host_read_and_spoils_the_rest() -> None:
    """The oracle of this file: a graph that leans on anything but static memory must give a wrong answer."""
    static, out = torch.ones(3), torch.zeros(3)
    box = {"factor": 2.0, "fresh": torch.ones(3), "kept": out}

    def work() -> None:
        box["kept"] = static * box["factor"] + box["fresh"]
        out.copy_(box["kept"])

    graph: Any = TracedGraphs().capture(work)
    static.fill_(10.0)
    box["factor"], box["fresh"] = 5.0, torch.full((3,), 100.0)
    graph.replay()
    assert out.tolist() == [21.0] * 3, "host values and addresses are those of the capture"
    assert box["kept"].isnan().all(), "memory of the graph is nobody's after a replay"
    for waiting in (lambda: static.max().item(), lambda: static[static > 0], lambda: static.nonzero()):
        with pytest.raises(CaptureError):
            TracedGraphs().capture(waiting)  # type: ignore[arg-type]
