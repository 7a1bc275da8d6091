"""Nothing on the way from logits to the relay waits for an accelerator, whatever the options: told by meta tensors.

They have shapes and a device that is not the CPU, but no values: an operation whose result or shape the host would have
to fetch raises. What would copy pageable memory raises too, since only `Staging` may send anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.batch.grammar_batch import TokenMask
from core.device.checks import AssertMode, DeviceChecks
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.memory.req_to_token_pool import ReqToTokenPool
from core.relay.future_map import FutureMap
from core.relay.payload import RelayPayload
from core.sampling.penalties import TokenHistory
from core.sampling.places import Places
from core.sampling.sampler import Sampler
from tests.unit.core.sampling.batches import Row, batch_of

ELSEWHERE = torch.device("meta")
VOCAB, ROWS, LONGEST = 1003, 6, 16

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    "bias": {"bias": ((7, 3.0), (9, -100.0))},
    "penalties": {"repetition": 1.2, "frequency": 0.5, "presence": 0.5, "prompt": (3, 4), "output": (5,)},
    "everything": {"top_k": 9, "top_p": 0.5, "min_p": 0.1, "bias": ((1, 1.0),), "repetition": 1.3, "output": (2, 2)},
}


class Stall(AssertionError):
    """Something that would hold the host up until the device has caught up, or the other way round."""


class NoTransfers(TorchDispatchMode):
    """Raises Stall for every operation that brings tensors from one device to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        devices = {each.device.type for each in tensors if each.dim() or each.device.type != "cpu"}
        if len(devices) > 1:
            raise Stall(f"{func} mixes {sorted(devices)}")
        return result


@contextmanager
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tensors stay where they are inside; yields the sizes of the transfers that `Staging` makes."""
    transfers: list[int] = []

    def send(staging: Staging, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        transfers.append(len(arrays))
        kinds = [torch.from_numpy(array[:0]).dtype for array in arrays]
        return [
            torch.empty(array.shape, dtype=kind, device=ELSEWHERE) for array, kind in zip(arrays, kinds, strict=True)
        ]

    monkeypatch.setattr(Staging, "upload", send)
    with NoTransfers():
        yield transfers


def some_rows(options: dict[str, Any], plain: int = 2) -> list[Row]:
    """Rows with `options`, between greedy ones, so that nobody may assume that all rows are alike."""
    nothing = torch.zeros(0)
    rows = [Row(nothing, **{"uniform": 0.3, **options}) for _ in range(ROWS - plain)]
    greedy = [Row(nothing, temperature=0.0)] * plain
    return [*greedy[:1], *rows, *greedy[1:]]


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_sampling_waits_for_nothing(name: str, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(OPTIONS[name], plain=0) if alike else some_rows(OPTIONS[name])
    batch = batch_of(rows, logprobs=True, top_logprobs=4)
    with elsewhere(monkeypatch):
        history = TokenHistory(torch.zeros(ROWS + 1, LONGEST, dtype=torch.int32, device=ELSEWHERE))
        at = torch.arange(ROWS, device=ELSEWHERE)
        for mask in (None, TokenMask(np.arange(2), np.ones((2, 32), np.int32))):
            logits = torch.empty(ROWS, VOCAB, device=ELSEWHERE)
            places = Places.of(batch, at, Staging(ELSEWHERE))
            found = Sampler(VOCAB, ELSEWHERE).sample(logits, batch, places, history, mask)
            assert found.tokens.shape == found.non_finite.shape == (ROWS,)
            history.append(at, at, found.tokens)
        history.seed([1, 2], [np.arange(3), np.arange(4)])


def test_a_greedy_batch_is_sampled_without_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(some_rows({"temperature": 0.0}, plain=0))
    with elsewhere(monkeypatch) as transfers:
        places = Places.of(batch, torch.arange(ROWS, device=ELSEWHERE), Staging(ELSEWHERE))
        Sampler(VOCAB, ELSEWHERE).sample(torch.empty(ROWS, VOCAB, device=ELSEWHERE), batch, places)
    assert not transfers


def test_the_relay_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = DeviceStreams(torch.device("cpu"))
    with elsewhere(monkeypatch):
        checks = DeviceChecks(AssertMode.COUNT, torch.device("cpu"))
        checks.counters = torch.zeros(2, dtype=torch.int64, device=ELSEWHERE)
        relay = FutureMap(ReqToTokenPool(ROWS, LONGEST, ELSEWHERE), streams, checks)
        rows = torch.arange(1, 4, device=ELSEWHERE)
        relay.lengths(rows, rows, rows)
        tokens = relay.gather(rows)
        relay.publish(rows, rows)
        relay.stash(rows, RelayPayload(tokens))
        relay.forget(rows)
        assert checks.snapshot(relay.violated(len(rows))).device == ELSEWHERE


@pytest.mark.parametrize("stalling", ["item", "mask", "nonzero", "pageable"])
def test_the_check_would_find_it(stalling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere(monkeypatch):
        values = torch.empty(4, device=ELSEWHERE)
        looks = {
            "item": lambda: values.max().item(),
            "mask": lambda: values[values > 0],
            "nonzero": lambda: values.nonzero(),
            "pageable": lambda: torch.zeros(4).to(ELSEWHERE),
        }
        with pytest.raises((Stall, RuntimeError)):
            looks[stalling]()
