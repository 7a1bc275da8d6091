"""Compiled code does to the relay's buffers what operations on tensors do, and tells the recorder of it."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from core.device.checks import AssertMode, DeviceChecks
from core.device.recorder import Recorder
from core.device.streams import DeviceStreams
from core.memory.req_to_token_pool import ReqToTokenPool
from core.native.host import HOST
from core.native.kept_library import ExtensionUnavailable
from core.relay.future_map import FutureMap
from core.relay.payload import Column, RelayPayload

CPU = torch.device("cpu")
ROWS, CONTEXT = 12, 20
EXTRAS = (Column("ids", torch.int64, (3,), fill=-1), Column("states", torch.bfloat16, (2,)))


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Heard:
    """A recorder that keeps what it is told of rows."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, list[int]]] = []

    def read(self, buffer: str, places: torch.Tensor) -> None:
        self.told.append(("read", buffer, places.tolist()))

    def wrote(self, buffer: str, places: torch.Tensor) -> None:
        self.told.append(("wrote", buffer, places.tolist()))

    def recorded(self, event: object, lane: str) -> None:
        """Of events nothing is kept."""


class Relay:
    """A FutureMap with its table, written to by hand."""

    def __init__(self, mode: AssertMode, compiled: bool, recorder: Heard | None = None) -> None:
        self.pool = ReqToTokenPool(ROWS, CONTEXT, CPU)
        self.pool.table.copy_(torch.arange(self.pool.table.numel()).view(ROWS + 1, CONTEXT))
        self.checks = DeviceChecks(mode, CPU)
        self.pool.recorder = cast(Recorder, recorder)
        self.map = FutureMap(self.pool, DeviceStreams(CPU, cast(Recorder, recorder)), self.checks, EXTRAS)
        if compiled:
            try:
                self.map.compile(HOST.load())
            except ExtensionUnavailable as reason:
                pytest.skip(f"no native code here: {reason}")

    def state(self) -> list[list[int]]:
        names = ("output_tokens_buf", "new_seq_lens_buf")
        return [*(self.map.buffer(name).tolist() for name in names), self.checks.counters.tolist()]


@pytest.mark.parametrize("mode", [AssertMode.COUNT, AssertMode.OFF])
def test_both_ways_leave_and_return_the_same(mode: AssertMode, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain, fast = Relay(mode, False), Relay(mode, True)
    for _ in range(300):
        some = torch.from_numpy(rng.permutation(ROWS + 1)[: rng.integers(1, ROWS)].astype(np.int64))
        count = len(some)
        lower, tokens = (torch.from_numpy(rng.integers(0, 8, count)) for _ in range(2))
        upper = lower + torch.from_numpy(rng.integers(0, 9, count))
        lens, dtype = torch.from_numpy(rng.integers(0, 16, count)), rng.choice([0, 1])
        ids = torch.from_numpy(rng.integers(0, 9, (count, 3)))
        answers = []
        for each in (plain, fast):
            after = torch.full_like(some, 99) if dtype else None
            got = each.map.enter(some, lower, upper, after)
            assert after is None or got.after is after
            slots = each.pool.slots(some, got.lens) if got.slots is None else got.slots
            left = [each.map.extra(column.name, some) for column in EXTRAS]
            answers.append(
                [*map(torch.Tensor.tolist, (got.ids, got.lens, got.after, slots, each.map.snapshot(count), *left))]
            )
            each.map.publish(some, lens.to(torch.int32) if dtype else lens)
            # Some are left unwritten, so that the next read of them is a violation.
            extras = {"ids": ids[::2], "states": ids[::2, :2].to(torch.bfloat16)}
            each.map.stash(some[::2].contiguous(), RelayPayload(tokens[::2].contiguous(), extras))
        assert answers[0] == answers[1]
        assert plain.state() == fast.state()


def test_a_recorder_is_told_the_same() -> None:
    told = []
    for compiled in (False, True):
        heard = Heard()
        relay = Relay(AssertMode.COUNT, compiled, heard)
        got = relay.map.enter(rows(2, 5), rows(0, 0), rows(9, 9))
        if got.slots is None:
            relay.pool.slots(rows(2, 5), got.lens)
        relay.map.publish(rows(2, 5), rows(1, 1))
        ids = torch.ones((2, 3), dtype=torch.int64)
        relay.map.stash(rows(2, 5), RelayPayload(rows(20, 50), {"ids": ids}))
        relay.map.extra("ids", rows(2, 5))
        relay.map.carry(rows(5), {"ids": ids[:1]})
        told.append(heard.told)
    assert told[0] == told[1] and len(told[0]) == 8, told


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trap_stops_before_anything_is_consumed(compiled: bool) -> None:
    relay = Relay(AssertMode.TRAP, compiled)
    relay.map.publish(rows(3, 4), rows(7, 8))
    relay.map.stash(rows(3), RelayPayload(rows(30)))
    with pytest.raises(RuntimeError, match="relay_seq_len"):
        relay.map.enter(rows(3), rows(8), rows(9))
    with pytest.raises(RuntimeError, match="relay_unwritten_read"):
        relay.map.enter(rows(3, 4), rows(7, 8), rows(7, 8))
    assert relay.map.enter(rows(3), rows(7), rows(7)).ids.tolist() == [30]


def test_rows_outside_of_the_relay_are_refused() -> None:
    relay = Relay(AssertMode.COUNT, True)
    for row in (-1, ROWS + 1):
        for call in (
            lambda at: relay.map.enter(at, rows(0), rows(0)),
            lambda at: relay.map.publish(at, rows(1)),
            lambda at: relay.map.stash(at, RelayPayload(rows(1))),
        ):
            with pytest.raises(IndexError):
                call(rows(row))


def test_a_place_behind_the_end_of_a_row_gets_the_padding_slot() -> None:
    relay = Relay(AssertMode.COUNT, True)
    relay.map.publish(rows(2, 3), rows(CONTEXT, CONTEXT - 1))
    slots = relay.map.enter(rows(2, 3), rows(0, 0), rows(CONTEXT, CONTEXT)).slots
    assert slots is not None and slots.tolist() == [0, 4 * CONTEXT - 1]
