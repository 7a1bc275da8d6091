"""Each row's own update by kernels that find it on the device, and captured decode steps with them.

What is marked `interpreted` runs in the process of `tests/unit/core/attention/test_triton.py`, and on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.models.lora.addresses import NOWHERE, PLACES, Addresses
from core.models.lora.packed import Delta, pack
from core.models.lora.recorded_hooks import Recordable
from core.models.lora.slots import LORA, AdapterSlots, LoraWrites, SlotWrite, group_tokens
from tests.support.fakes.traced_graphs import GraphStreams
from tests.unit.core.attention.test_conformance import DEVICE, INTERPRETED, TOLERANCE
from tests.unit.core.attention.test_triton import interpreted, needs_triton
from tests.unit.core.attention.test_triton_compiles import compiled
from tests.unit.core.executor.test_decode_graphs import ROWS, SumModel, World, graphs_of

HERE = torch.device(DEVICE)
WIDE = 6
INPUTS, OUTPUTS = 300, 140
"""More than a block of each, and no multiple of one."""


def drawn(rank: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> dict[str, Delta]:
    """An adapter of layer "up" alone, as `pack` lays it out, on the device."""
    a, b = torch.randn(rank, INPUTS, generator=generator), torch.randn(OUTPUTS, rank, generator=generator)
    adapter = pack({"up": Delta(a.to(dtype), (b / rank).to(dtype))}, pin=False)
    return dict(adapter.deltas(HERE))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_rows_get_their_own_update(dtype: torch.dtype) -> None:
    """Ranks within a block of ranks, beyond it and across the most; a row without an adapter keeps what it has."""
    from core.models.lora.row_deltas import add_row_deltas

    generator = torch.Generator().manual_seed(3)
    addresses = Addresses(["down", "up"], dtype, HERE)
    adapters = {slot: drawn(rank, generator, dtype) for slot, rank in ((7, 3), (9, 17), (12, 32))}
    for slot, deltas in adapters.items():
        addresses.fill(slot, deltas, Staging(HERE))
    slots = [9, 0, 12, 7]
    x, y = (torch.randn(len(slots), width, generator=generator).to(HERE, dtype) for width in (INPUTS, OUTPUTS))
    places = torch.tensor([addresses.place(slot) for slot in slots], device=HERE)
    got, wide = y.clone(), torch.zeros(len(slots), OUTPUTS + 5, dtype=dtype, device=HERE)
    add_row_deltas(got, x, addresses.origin, addresses.of("up"), places, 32)
    add_row_deltas(wide[:, :OUTPUTS], x, addresses.origin, addresses.of("up"), places, 32)
    for row, slot in enumerate(slots):
        delta = adapters[slot]["up"] if slot else None
        added = 0 if delta is None else (x[row].double() @ delta.a.double().T) @ delta.b.double().T
        scale = float((y[row].double() + added).abs().max())
        assert (got[row].double() - y[row].double() - added).abs().max() <= TOLERANCE[dtype] * max(1.0, scale)
    assert torch.equal(got[1], y[1]) and not wide[1].any() and not wide[:, OUTPUTS:].any()
    untouched = y.clone()
    add_row_deltas(untouched, x, addresses.origin, addresses.of("down"), places, 32)
    assert torch.equal(untouched, y), "they change another layer"


def test_a_place_is_used_again_and_knows_nothing_of_the_adapter_before() -> None:
    generator = torch.Generator().manual_seed(4)
    addresses = Addresses(["down", "up"], torch.float32, torch.device("cpu"))
    staging = Staging(torch.device("cpu"))
    first, second = (drawn(rank, generator) for rank in (2, 5))
    addresses.fill(40, first, staging)
    place = addresses.place(40)
    origin, (a, b, rank) = addresses.origin, addresses.of("up")[place].tolist()
    assert place != NOWHERE and rank == 2 and not addresses.of("down")[place].any()
    assert [origin.data_ptr() + 4 * at for at in (a, b)] == [first["up"].a.data_ptr(), first["up"].b.data_ptr()]
    addresses.empty(40)
    assert addresses.place(40) == NOWHERE and not addresses.of("up")[place].any()
    addresses.fill(41, {"down": second["up"]}, staging)
    assert addresses.place(41) == place and not addresses.of("up")[place].any()
    assert addresses.of("down")[place].tolist()[2] == 5 and not addresses.of("down")[NOWHERE].any()


def test_adapters_without_a_place_are_told_apart() -> None:
    generator, staging = torch.Generator().manual_seed(5), Staging(torch.device("cpu"))
    addresses = Addresses(["up"], torch.float32, torch.device("cpu"))
    deltas = drawn(1, generator)
    addresses.fill(1, {"beside": deltas["up"]}, staging)
    assert addresses.place(1) == NOWHERE, "a layer that captured steps leave alone"
    for slot in range(2, PLACES + 3):
        addresses.fill(slot, deltas, staging)
    assert addresses.place(PLACES + 1) and addresses.place(PLACES + 2) == NOWHERE, "all are taken"
    addresses.empty(5)
    addresses.fill(PLACES + 2, deltas, staging)
    assert addresses.place(PLACES + 2)


class AdaptedModel(SumModel):
    """Adds what two layers make of a token, one behind the other."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(*(torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(2))).to(device)
        for linear in self.module:
            linear.weight.data = torch.eye(WIDE, device=device)

    def total(self, batch: Any) -> torch.Tensor:
        ids = batch.input_ids[None, :, None] + torch.arange(WIDE, device=batch.input_ids.device)
        return super().total(batch) + self.module((ids % 5).float())[0].sum(-1).long()


class AdaptedWorld(World):
    """Rows with adapters of `self.module`."""

    limits = Recordable(torch.float32, 4)

    def made(self) -> tuple[SumModel, dict[str, Any]]:
        model = AdaptedModel(self.streams.device)
        self.slots = AdapterSlots(model.module, self.limits)
        self.pending: list[SlotWrite] = []
        return model, {LORA: self.slots}

    def load(self, slot: int, seed: int, layers: Sequence[str]) -> None:
        """An adapter of whole numbers, so that sums in any order are equal."""
        draw = torch.Generator().manual_seed(seed)
        rank = 1 + seed % 4
        shapes = (rank, WIDE), (WIDE, rank)
        deltas = {
            name: Delta(*(torch.randint(-2, 3, shape, generator=draw).float() for shape in shapes)) for name in layers
        }
        self.pending.append(SlotWrite(slot, pack(deltas, pin=self.streams.device.type == "cuda")))

    def writes(self, row_slots: Sequence[int]) -> dict[str, object]:
        """Of a step whose rows have these slots."""
        slots = np.array(row_slots, np.int64)
        pending, self.pending = tuple(self.pending), []
        return {LORA: LoraWrites(pending, group_tokens(slots, np.ones_like(slots)), len(slots), slots)}


def streams_here() -> DeviceStreams:
    return DeviceStreams(HERE) if DEVICE == "cuda" else GraphStreams()


def adapted_worlds(streams: Callable[[], DeviceStreams] = streams_here) -> tuple[AdaptedWorld, AdaptedWorld]:
    """One that replays, and one that does not, each on `streams` of its own."""
    world, plain = AdaptedWorld(streams()), AdaptedWorld(streams())
    plain.runner.graphs = None
    for each in (world, plain):
        each.start(list(range(1, ROWS + 1)), [3, 5, 7, 9, 11, 13, 15, 17], 4)
    return world, plain


@interpreted
def test_interpreted_replays_have_the_adapters_of_their_rows() -> None:
    compare_adapters(*adapted_worlds())


def compare_adapters(world: AdaptedWorld, plain: AdaptedWorld) -> None:
    """Rows with and without adapters, in sizes up and down; adapters that come, go and take the memory of others."""
    script: list[tuple[dict[int, int], list[int], list[int]]] = [
        ({1: 10, 2: 11}, [1, 2, 3], [1, 2, 0]),
        ({}, [1, 2, 3], [1, 2, 0]),
        ({}, [3, 1, 5, 2, 4, 6, 7, 8], [0, 2, 1, 1, 0, 2, 0, 1]),
        ({}, [2, 3], [0, 0]),
        ({1: -1, 3: 13}, [2], [3]),
        ({}, [4, 2], [3, 2]),
        ({}, [5], [3]),
    ]
    replayed = 0
    for loads, rows, row_slots in script:
        outcomes = []
        for each in (world, plain):
            for slot, number in loads.items():
                if number < 0:
                    each.pending.append(SlotWrite(slot, None))
                else:
                    each.load(slot, number, ["0", "1"] if number % 2 else ["1"])
            outcomes.append(each.step(rows, companion_writes=each.writes(row_slots)))
        assert outcomes[0] == outcomes[1], (rows, row_slots)
        replayed += not loads
        assert graphs_of(world).replays == replayed, "a step that brings an adapter runs eagerly, no other"


@interpreted
def test_interpreted_graphs_leave_alone_what_they_have_no_place_for() -> None:
    """A step with an adapter of a layer that no graph adapts is not taken; one without adapters is."""
    world, _ = adapted_worlds()
    hooks = world.slots._recorded
    assert hooks is not None
    hooks._missed.add("1")
    world.load(1, 10, ["1"])
    world.load(2, 11, ["0"])
    world.step([1, 2], companion_writes=world.writes([1, 2]))
    taken = [graphs_of(world).takes(world.batch([1], companion_writes=world.writes([slot]))) for slot in (0, 1, 2)]
    assert taken == [True, False, True]
    fresh = AdaptedWorld(streams_here())
    before = fresh.model.module(torch.ones(1, WIDE, device=HERE))  # type: ignore[attr-defined]
    assert torch.equal(before, torch.ones(1, WIDE, device=HERE)), "no hook stays on a layer"


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="can run here")
def test_where_no_kernel_runs_steps_with_adapters_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        world, plain = adapted_worlds()
    assert "decode steps with adapters are not captured: Triton" in caplog.text
    for each in (world, plain):
        each.load(1, 10, ["1"])
    mine, theirs = (each.step([1, 2], companion_writes=each.writes([1, 0])) for each in (world, plain))
    assert mine == theirs and not graphs_of(world).replays
    world.step([1, 2])
    assert graphs_of(world).replays == 1


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("capability", [80, 90])
def test_updates_compile(capability: int) -> None:
    from core.models.lora import row_deltas

    shared = {"WIDTH": 4096, "BLOCK_R": row_deltas.BLOCK_R}
    pointers: dict[str, Any] = dict.fromkeys(("table", "places"), "*i64")
    pointers |= dict.fromkeys(("low", "x", "origin"), "*bf16")
    kernel = compiled(row_deltas._shrink, pointers, shared | {"BLOCK_K": row_deltas.BLOCK_K}, capability)
    assert "ld.global.v4" in kernel.asm["ptx"], "weights are read 16 bytes at a time"
    pointers = {name: each for name, each in pointers.items() if name != "x"} | {"y": "*bf16"}
    assert compiled(row_deltas._expand, pointers, shared | {"BLOCK_O": row_deltas.BLOCK_O}, capability).asm["cubin"]
