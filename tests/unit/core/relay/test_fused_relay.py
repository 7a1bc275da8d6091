"""One kernel does to the relay's buffers what operations on tensors do, in one launch, whichever rows there are.

What is marked `interpreted` runs in the process of `tests/unit/core/attention/test_triton.py`, and on a CUDA device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.device.checks import AssertMode, DeviceChecks
from core.device.recorder import Recorder
from core.device.streams import DeviceStreams
from core.memory.req_to_token_pool import ReqToTokenPool
from core.relay.future_map import FutureMap
from core.relay.payload import RelayPayload
from tests.unit.core.attention.test_conformance import DEVICE
from tests.unit.core.attention.test_triton import interpreted, needs_triton
from tests.unit.core.attention.test_triton_compiles import INTERPRETED, assembled, compiled
from tests.unit.core.executor import test_decode_graphs as graphs
from tests.unit.core.relay.test_compiled import Heard

ROWS, CONTEXT, PROGRAM = 12, 20, 8
HERE = torch.device(DEVICE)


class Relay:
    """A FutureMap whose table has a number of its own in each place."""

    def __init__(self, mode: AssertMode, fused: bool, recorder: Heard | None = None) -> None:
        heard = cast(Recorder, recorder)
        self.pool = ReqToTokenPool(ROWS, CONTEXT, HERE)
        self.pool.table[1:] = torch.arange(ROWS * CONTEXT, device=HERE).view(ROWS, CONTEXT) + CONTEXT
        self.pool.recorder = heard
        self.checks = DeviceChecks(mode, HERE)
        self.map = FutureMap(self.pool, DeviceStreams(HERE, heard), self.checks)
        self.map._fused = None
        if fused:
            self.map.fuse()

    def enter(self, rows: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, kept: bool) -> list[list[int]]:
        """What a step reads, and its snapshot. `kept`: with a place for the lengths behind it."""
        after = torch.full_like(rows, 99) if kept else None
        got = self.map.enter(rows, lower, upper, after)
        assert after is None or got.after is after
        slots = self.pool.slots(rows, got.lens) if got.slots is None else got.slots
        read = (got.ids, got.lens, got.after, slots, self.map.snapshot(len(rows)))
        return [each.tolist() for each in read]

    def state(self) -> list[list[int]]:
        held = [self.map.buffer(name) for name in ("output_tokens_buf", "new_seq_lens_buf")]
        return [each.tolist() for each in (*held, self.checks.counters, self.map.violated(ROWS + 1))]


class Operations(TorchDispatchMode):
    """Names of operations that launch something: neither views nor new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if launches(func):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def launches(func: Any) -> bool:
    return not func.is_view and "empty" not in func.__name__


def at(rng: np.random.Generator, values: Any) -> torch.Tensor:
    """`values` somewhere in other memory, as the parts of an upload are: also at odd places."""
    begin = int(rng.integers(0, 3))
    held = np.concatenate([np.full(begin, 7), np.asarray(values, np.int64)])
    return torch.from_numpy(held).to(HERE)[begin:]


def some_rows(rng: np.random.Generator, step: int) -> list[int]:
    """Of any number, zero and one among them; some with padding behind them."""
    count = step % 3 if step < 6 else int(rng.integers(0, ROWS + 1))
    padding = min(int(rng.choice([0, 0, 1, 4])), ROWS + 1 - count)
    return [*rng.permutation(np.arange(1, ROWS + 1))[:count].tolist(), *[0] * padding]


@interpreted
@pytest.mark.parametrize("mode", [AssertMode.COUNT, AssertMode.OFF])
def test_interpreted_both_ways_leave_and_return_the_same(
    mode: AssertMode, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more rows than a program has, too."""
    monkeypatch.setattr("core.relay.fused.BLOCK", PROGRAM)
    rng = np.random.default_rng(seed)
    plain, fused = Relay(mode, False), Relay(mode, True)
    for step in range(32 if mode is AssertMode.COUNT else 12):
        rows = some_rows(rng, step)
        real = [row for row in rows if row]
        lower = rng.integers(0, 8, len(real))
        upper = lower + rng.integers(0, 9, len(real))
        padding = [0] * (len(rows) - len(real))
        given = [at(rng, [*each, *padding]) for each in (real, lower, upper)]
        kept = bool(rng.integers(0, 2))
        assert plain.enter(*given, kept) == fused.enter(*given, kept), (step, rows)
        published, tokens = at(rng, rng.integers(0, 16, len(real))), rng.integers(0, 99, len(real))
        for each in (plain, fused):
            each.map.publish(given[0][: len(real)], published)
            # Some are left unwritten, so that the next read of them is a violation.
            each.map.stash(at(rng, real[::2]), RelayPayload(at(rng, tokens[::2])))
        assert plain.state() == fused.state(), (step, rows)
    counted = plain.checks.counters.tolist()
    assert all(counted) if mode is AssertMode.COUNT else not any(counted), "violations are among them"


@interpreted
def test_interpreted_what_the_pool_does_not_have_is_read_from_nowhere() -> None:
    relay = Relay(AssertMode.COUNT, True)
    relay.map.publish(torch.tensor([2, 3], device=HERE), torch.tensor([CONTEXT, 5], device=HERE))
    relay.map.stash(torch.tensor([2, 3], device=HERE), RelayPayload(torch.tensor([20, 30], device=HERE)))
    rows = torch.tensor([2, 3, -1, ROWS + 1], device=HERE)
    ids, lens, after, slots, snapshot = relay.enter(rows, torch.zeros_like(rows), torch.full_like(rows, CONTEXT), False)
    assert ids == [20, 30, 0, 0] and lens == [CONTEXT, 5, 0, 0] and after == [CONTEXT + 1, 6, 1, 1]
    assert slots == [0, 3 * CONTEXT + 5, 0, 0], "a place behind the end of a row gets the padding slot"
    assert snapshot == [2, 0, 0, 0, 1, 1], "rows that the relay does not have"
    rows = torch.tensor([2], device=HERE)
    _, lens, _, slots, _ = relay.enter(rows, rows - 3, rows - 3, False)
    assert lens == [-1] and slots == [0], "a place before a row is another row's last"


@interpreted
def test_interpreted_padding_reads_zero_whatever_was_left_there() -> None:
    """All padded rows alike, whichever of them the device comes to first."""
    relay = Relay(AssertMode.COUNT, True)
    relay.map.buffer("output_tokens_buf")[0] = 5
    rows = torch.zeros(3, dtype=torch.int64, device=HERE)
    assert relay.enter(rows, rows, rows, False)[0] == [0, 0, 0]
    assert relay.map.buffer("output_tokens_buf")[0] == 0 and not relay.checks.counters.any()


@interpreted
def test_interpreted_the_kernel_is_there_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled or imported for a launch is so when the engine is built, and leaves everything as it was."""
    launched: list[list[int]] = []
    from core.relay import fused

    monkeypatch.setattr(fused, "enter_rows", lambda found, after, rows, *rest: launched.append(rows.tolist()))
    Relay(AssertMode.COUNT, True)
    # On a GPU the map has one when it is made, and the one that is asked for here takes its place.
    assert launched == [[0]] * (2 if HERE.type == "cuda" else 1)
    monkeypatch.undo()
    assert Relay(AssertMode.COUNT, True).state() == Relay(AssertMode.COUNT, False).state()


@interpreted
def test_interpreted_a_recorder_is_told_the_same() -> None:
    told = []
    for fused in (False, True):
        relay = Relay(AssertMode.COUNT, fused, heard := Heard())
        rows = torch.tensor([2, 5], device=HERE)
        relay.enter(rows, rows, rows, False)
        told.append(heard.told)
    assert told[0] == told[1] and len(told[0]) == 3, told


@interpreted
def test_interpreted_a_step_begins_with_one_launch() -> None:
    counted = {}
    for fused in (False, True):
        relay, rows = Relay(AssertMode.COUNT, fused), torch.tensor([2, 5], device=HERE)
        with torch.inference_mode(), Operations() as seen:
            relay.enter(rows, rows, rows, True)
        counted[fused] = [name for name in seen.names if name not in ("full_like", "cat")]
    assert counted[True] == ["enter_rows"]
    assert len(counted[False]) == 16, "as the module says"


def fused_world(patch: pytest.MonkeyPatch) -> graphs.World:
    """A runner whose decode steps are captured with the kernel in them."""

    def made(*parts: Any) -> FutureMap:
        relay = FutureMap(*parts)
        relay.fuse()
        return relay

    patch.setattr(graphs, "FutureMap", made)
    return graphs.World()


@pytest.mark.skipif(not INTERPRETED, reason="runs interpreted, in a process of `attention/test_triton.py`")
def test_interpreted_captured_steps_begin_with_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, world = graphs.World(), fused_world(monkeypatch)
    graphs.compare_changing_batches(world, plain)
    made = cast(graphs.GraphStreams, world.streams).graphs
    assert made is not None and sum(graph.replays for graph in made.made) == 7
    for graph in made.made:
        names = [call.op.overloadpacket.__name__ for call in graph.calls if launches(call.op)]
        assert names[:2] == ["enter_rows", "ones_like"], "the second is the model's"


@pytest.mark.parametrize(
    ("device", "mode", "installed", "fuses"),
    [
        pytest.param("cuda", AssertMode.COUNT, True, True, id="counts"),
        pytest.param("cuda", AssertMode.OFF, True, True, id="off"),
        pytest.param("cuda", AssertMode.TRAP, True, False, id="a trap stops before anything is consumed"),
        pytest.param("cuda", AssertMode.COUNT, False, False, id="no Triton"),
        pytest.param("cpu", AssertMode.COUNT, True, False, id="no GPU"),
    ],
)
def test_devices_with_triton_get_the_kernel(
    device: str, mode: AssertMode, installed: bool, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the relay are on the CPU here: only the choice is looked at."""
    chosen: list[FutureMap] = []
    monkeypatch.setattr("core.relay.future_map.find_spec", lambda _: object() if installed else None)
    monkeypatch.setattr(FutureMap, "fuse", lambda self: chosen.append(self))
    streams: Any = SimpleNamespace(device=torch.device(device), recorder=None)
    cpu = torch.device("cpu")
    relay = FutureMap(ReqToTokenPool(ROWS, CONTEXT, cpu), streams, DeviceChecks(mode, cpu))
    assert chosen == ([relay] if fuses else [])


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_and_spills_nothing(capability: int) -> None:
    from core.relay import fused

    names = ("rows", "lower", "upper", "found", "after", "tokens", "lens", "violated", "counters")
    pointers = dict.fromkeys(names, "*i64") | {"table": "*i32"}
    kernel = compiled(fused._enter, pointers, {"CHECKED": True, "BLOCK": fused.BLOCK}, capability)
    assert kernel.asm["cubin"] and assembled(kernel, capability, r"(\d+) bytes spill stores") == 0
