"""What a rank needs of an adapter: parts of all ranks together are the whole, and what cannot be cut is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.device.staging import Staging
from core.models.lora.packed import Delta, pack
from core.models.lora.shares import INPUTS, OUTPUTS, Share, cut, shares_of, why_not_shared
from core.models.lora.slots import AdapterSlots, LoraWrites, SlotWrite, group_tokens
from tests.unit.core.models.test_recurrent_steps import ints

INSIDE, OUTSIDE, RANK = 7, 5, 3


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this process is the second; what they would tell each other is not told."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


class Layers(torch.nn.Module):
    """A layer of each kind, with the names that models have, and the plan of `transformers` for them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict(_linears(mesh))])
        self._tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.packed": "packed_colwise"}


def _linears(mesh: DeviceMesh) -> dict[str, torch.nn.Module]:
    made: dict[str, torch.nn.Module] = {}
    for name, dim in (("up", OUTPUTS), ("down", INPUTS), ("packed", OUTPUTS), ("plain", None)):
        made[name] = torch.nn.Linear(INSIDE, OUTSIDE, bias=False).requires_grad_(False)
        if dim is not None:
            whole = made[name].weight
            shared = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
            made[name].weight = torch.nn.Parameter(shared, requires_grad=False)
    return made


def delta(seed: int) -> Delta:
    made = torch.Generator().manual_seed(seed)
    return Delta(torch.randn(RANK, INSIDE, generator=made), torch.randn(OUTSIDE, RANK, generator=made))


def test_layers_are_found_by_what_the_rank_has_of_them(mesh: DeviceMesh) -> None:
    """Five outputs are three and two; seven inputs are four and three."""
    found = shares_of(Layers(mesh))
    assert {name: (each.dim, each.first, each.last) for name, each in found.items()} == {
        "layers.0.up": (OUTPUTS, 3, 5),
        "layers.0.down": (INPUTS, 4, 7),
    }
    packed = torch.nn.Linear(2, 2)
    del packed.weight
    assert shares_of(torch.nn.ModuleList([torch.nn.Linear(2, 2), packed])) == {}, "nor where weights are packed"


def test_what_ranks_share_in_another_way_is_not_adapted(mesh: DeviceMesh) -> None:
    model = Layers(mesh)
    modules = dict(model.named_modules())
    told = {name: why_not_shared(name, module, model) for name, module in modules.items()}
    assert [name for name, why in told.items() if why] == ["layers.0.packed"]
    assert told["layers.0.packed"] == "which ranks share out as 'packed_colwise', and is not adapted"


def test_parts_of_all_ranks_are_the_whole() -> None:
    whole, x = delta(1), torch.randn(4, INSIDE)
    group: Any = None
    columns = [Share(INPUTS, *ends, group).cut(whole) for ends in ((0, 4), (4, 7))]
    low = sum(x[:, first:last] @ each.a.T for (first, last), each in zip(((0, 4), (4, 7)), columns))
    expected = x @ whole.a.T @ whole.b.T
    assert torch.allclose(low @ whole.b.T, expected, atol=1e-5) and all(each.b.equal(whole.b) for each in columns)
    rows = [Share(OUTPUTS, *ends, group).cut(whole) for ends in ((0, 3), (3, 5))]
    assert torch.allclose(torch.cat([x @ each.a.T @ each.b.T for each in rows], 1), expected, atol=1e-5)


def test_an_adapter_is_cut_layer_by_layer(mesh: DeviceMesh) -> None:
    shares = shares_of(Layers(mesh))
    whole = {f"layers.0.{name}": delta(seed) for seed, name in enumerate(("up", "down", "plain"))}
    own = cut(pack(whole, pin=False), shares).deltas(torch.device("cpu"))
    assert own["layers.0.up"].b.equal(whole["layers.0.up"].b[3:]) and own["layers.0.up"].a.shape == (RANK, INSIDE)
    assert own["layers.0.down"].a.equal(whole["layers.0.down"].a[:, 4:])
    assert own["layers.0.plain"].a.equal(whole["layers.0.plain"].a)


def test_ranks_add_up_what_each_has_of_the_inputs(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before B, and in no layer of which they have outputs. What the other rank has is one everywhere here."""
    joined: list[tuple[int, ...]] = []

    def join(low: torch.Tensor, group: Any) -> None:
        joined.append(tuple(low.shape))
        low.add_(1)

    monkeypatch.setattr(dist, "all_reduce", join)
    model, staging = Layers(mesh), Staging(torch.device("cpu"))
    # The forward of `transformers` over shared weights, whose parts have shapes of their own.
    parts = {"up": torch.randn(2, INSIDE), "down": torch.randn(OUTSIDE, 3)}
    for name, weight in parts.items():
        layer: Any = model.layers[0][name]  # type: ignore[index]
        layer.forward = lambda x, weight=weight: x @ weight.T
    slots = AdapterSlots(model)
    whole = {f"layers.0.{name}": delta(seed) for seed, name in enumerate(parts)}
    rows = ints(2, 0, 2)
    writes = LoraWrites(
        (SlotWrite(2, pack(whole, pin=False)),), group_tokens(rows, ints(1, 1, 1)), num_tokens=3, row_slots=rows
    )
    slots.begin(torch.zeros(3, dtype=torch.int64), writes, staging)
    with torch.inference_mode():
        for name, inputs in (("up", INSIDE), ("down", 3)):
            x, adapted, own = torch.randn(3, inputs), [0, 2], whole[f"layers.0.{name}"]
            got = model.layers[0][name](x)  # type: ignore[index]
            low = x @ (own.a if name == "up" else own.a[:, 4:]).T + (name == "down")
            expected = x @ parts[name].T
            expected[adapted] += (low @ (own.b[3:] if name == "up" else own.b).T)[adapted]
            assert torch.allclose(got, expected, atol=1e-5), name
    assert joined == [(2, RANK)]
    assert slots.prepare(8, staging) == "ranks share out the layers that adapters change"
