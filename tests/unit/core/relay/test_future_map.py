"""The FutureMap: every read sees its row's last write, and an unwritten read is noticed in every mode that looks."""

from __future__ import annotations

import random

import pytest
import torch

from core.device.checks import DEVICE_CHECKS, AssertMode, DeviceChecks
from core.device.streams import DeviceStreams
from core.invariants import InvariantViolation
from core.memory.req_to_token_pool import ReqToTokenPool
from core.relay.future_map import FutureMap
from core.relay.payload import Column, RelayPayload

CPU = torch.device("cpu")


def make(
    mode: AssertMode = AssertMode.TRAP, size: int = 8, extras: tuple[Column, ...] = ()
) -> tuple[FutureMap, DeviceChecks]:
    checks = DeviceChecks(mode, CPU)
    return FutureMap(ReqToTokenPool(size, 4, CPU), DeviceStreams(CPU), checks, extras), checks


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_gather_sees_the_last_stash_once() -> None:
    future_map, _ = make()
    future_map.stash(rows(3, 8, 1), RelayPayload(torch.tensor([30, 80, 10])))
    assert future_map.gather(rows(8, 3)).tolist() == [80, 30]
    assert future_map.buffer("output_tokens_buf").tolist() == [0, 10, -1, -1, -1, -1, -1, -1, -1]


def test_last_row_is_inside_and_buffers_follow_the_table() -> None:
    future_map, _ = make(size=5)
    assert future_map.num_rows == 6 == len(future_map.buffer("new_seq_lens_buf"))
    future_map.stash(rows(5), RelayPayload(torch.tensor([7])))
    assert future_map.gather(rows(5)).tolist() == [7]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("column", [True, False])
def test_payload_shape_and_dtype_are_coerced(dtype: torch.dtype, column: bool) -> None:
    future_map, _ = make()
    tokens = torch.tensor([5, 6], dtype=dtype)
    future_map.stash(rows(1, 2), RelayPayload(tokens.view(-1, 1) if column else tokens))
    gathered = future_map.gather(rows(2, 1))
    assert gathered.tolist() == [6, 5] and gathered.dtype is torch.int64


def test_empty_rows_return_before_any_shape_is_looked_at() -> None:
    future_map, _ = make()
    nothing = rows()
    future_map.stash(nothing, RelayPayload(torch.zeros(3, 4, 5)))
    assert future_map.publish(nothing, torch.zeros(2, 2)) is None
    assert future_map.gather(nothing).shape == future_map.lengths(nothing, nothing, nothing).shape == (0,)
    future_map.forget(nothing)


def test_every_publish_has_its_own_event() -> None:
    future_map, _ = make()
    first = future_map.publish(rows(1), torch.tensor([4], dtype=torch.int32))
    second = future_map.publish(rows(1), torch.tensor([5]))
    assert first is not None and second is not None and first is not second
    assert future_map.extra("new_seq_lens_buf", rows(1)).tolist() == [5]


def test_trap_stops_at_an_unwritten_read_and_says_why() -> None:
    future_map, _ = make(AssertMode.TRAP)
    with pytest.raises(RuntimeError, match="relay_unwritten_read"):
        future_map.gather(rows(4))
    future_map.stash(rows(4), RelayPayload(torch.tensor([1])))
    future_map.gather(rows(4))
    with pytest.raises(RuntimeError, match="relay_unwritten_read"):
        future_map.gather(rows(4))


def test_trap_fires_under_compile_too() -> None:
    """Without a message `torch.compile` drops `_assert_async` silently; ours has one."""
    compiled = torch.compile(lambda v: torch._assert_async((v >= 0).all(), "relay_unwritten_read"), backend="aot_eager")
    with pytest.raises(RuntimeError, match="relay_unwritten_read"):
        compiled(torch.tensor([1, -1]))


def test_count_goes_on_with_a_legal_token_and_counts() -> None:
    future_map, checks = make(AssertMode.COUNT)
    future_map.stash(rows(1), RelayPayload(torch.tensor([9])))
    assert future_map.gather(rows(1, 2, 3)).tolist() == [9, 0, 0]
    assert checks.counters.tolist() == [2, 0]


def test_off_looks_at_nothing() -> None:
    future_map, checks = make(AssertMode.OFF)
    assert future_map.gather(rows(2)).tolist() == [-1]
    assert checks.counters.sum() == 0


def test_padding_row_is_exempt_and_stays_readable() -> None:
    future_map, checks = make(AssertMode.COUNT)
    for _ in range(3):
        assert future_map.gather(rows(0, 0)).tolist() == [0, 0]
    assert checks.counters.sum() == 0


def test_published_lengths_must_be_among_those_that_were_planned() -> None:
    future_map, checks = make(AssertMode.COUNT)
    future_map.publish(rows(1, 2, 3, 4), torch.tensor([7, 9, 5, 6]))
    future_map.stash(rows(1, 3, 4), RelayPayload(torch.tensor([3, 4, 5])))
    found = future_map.lengths(rows(1, 2, 3, 4), torch.tensor([5, 6, 6, 6]), torch.tensor([7, 8, 9, 9]))
    assert found.tolist() == [7, 8, 6, 6], "cut to what the plan allows: the row's own pages"
    future_map.gather(rows(1, 2, 3, 4))
    assert future_map.violated(4).tolist() == [0, 1, 1, 0]
    assert dict(zip(DEVICE_CHECKS, checks.counters.tolist(), strict=True)) == {
        "relay_unwritten_read": 1,
        "relay_seq_len": 2,
    }
    found = future_map.lengths(rows(4), torch.tensor([6]), torch.tensor([6]))
    assert found.tolist() == [6] and future_map.violated(4).tolist() == [0, 1, 1, 0], "marks are those of the last call"


def test_a_trap_stops_at_a_length_that_was_not_planned() -> None:
    future_map, _ = make(AssertMode.TRAP)
    future_map.publish(rows(1), torch.tensor([7]))
    with pytest.raises(RuntimeError, match="relay_seq_len"):
        future_map.lengths(rows(1), torch.tensor([8]), torch.tensor([9]))


def test_without_checks_a_length_is_cut_all_the_same() -> None:
    future_map, checks = make(AssertMode.OFF)
    future_map.publish(rows(1), torch.tensor([70]))
    assert future_map.lengths(rows(1), torch.tensor([8]), torch.tensor([9])).tolist() == [9]
    assert checks.counters.sum() == 0


def test_forget_makes_the_next_owners_early_read_visible() -> None:
    future_map, checks = make(AssertMode.COUNT)
    future_map.stash(rows(2), RelayPayload(torch.tensor([5])))
    future_map.forget(rows(2))
    future_map.gather(rows(2))
    assert checks.counters[0] == 1
    assert future_map.buffer("output_tokens_buf")[0] == 0


def test_duplicate_and_foreign_rows_are_refused_when_trapping() -> None:
    future_map, _ = make(AssertMode.TRAP)
    with pytest.raises(InvariantViolation, match="relay_rows_unique"):
        future_map.stash(rows(1, 1), RelayPayload(torch.tensor([1, 2])))
    with pytest.raises(InvariantViolation, match="relay_rows_range"):
        future_map.stash(rows(9), RelayPayload(torch.tensor([1])))


def test_payload_of_the_wrong_length_is_refused() -> None:
    future_map, _ = make()
    with pytest.raises(InvariantViolation, match="relay_payload_shape"):
        future_map.stash(rows(1, 2), RelayPayload(torch.tensor([1])))


def test_declared_extras_travel_with_their_rows() -> None:
    hidden = Column("hidden_states", torch.float32, (3,))
    future_map, _ = make(extras=(hidden,))
    values = torch.arange(6, dtype=torch.float64).view(2, 3)
    future_map.stash(rows(2, 5), RelayPayload(torch.tensor([1, 2]), {"hidden_states": values}))
    assert future_map.extra("hidden_states", rows(5, 2)).tolist() == [[3, 4, 5], [0, 1, 2]]
    with pytest.raises(InvariantViolation, match="relay_payload_shape"):
        future_map.stash(rows(1), RelayPayload(torch.tensor([1]), {"hidden_states": torch.zeros(1, 4)}))
    with pytest.raises(InvariantViolation, match="relay_payload_shape"):
        make(extras=(hidden, hidden))


def test_random_traffic_against_a_dict(seed: int) -> None:
    rng = random.Random(seed)
    future_map, _ = make(AssertMode.TRAP, size=6)
    written: dict[int, int] = {}
    for _ in range(600):
        chosen = rng.sample(range(1, 7), rng.randint(1, 4))
        if rng.random() < 0.5:
            tokens = [rng.randrange(1000) for _ in chosen]
            future_map.stash(rows(*chosen), RelayPayload(torch.tensor(tokens)))
            written.update(zip(chosen, tokens, strict=True))
        elif readable := [r for r in chosen if r in written]:
            assert future_map.gather(rows(*readable)).tolist() == [written.pop(r) for r in readable]


def test_what_is_carried_leaves_tokens_alone_and_is_forgotten_with_its_row() -> None:
    future_map, _ = make(extras=(Column("states", torch.float32, (2,)),))
    future_map.stash(rows(3, 5), RelayPayload(torch.tensor([30, 50])))
    future_map.carry(rows(5, 7), {"states": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)})
    assert future_map.extra("states", rows(7, 3, 5)).tolist() == [[3, 4], [0, 0], [1, 2]]
    assert future_map.gather(rows(3, 5)).tolist() == [30, 50]
    future_map.forget(rows(5))
    assert future_map.extra("states", rows(5)).tolist() == [[0, 0]]
    with pytest.raises(InvariantViolation, match="relay_payload_shape"):
        future_map.carry(rows(5), {"states": torch.zeros(1, 3)})
