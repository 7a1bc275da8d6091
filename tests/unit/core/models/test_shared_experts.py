"""Rows of several engines meet in each layer of experts; an engine without rows computes for those of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from core.invariants import InvariantViolation
from core.models.experts.shared_experts import ExpertLayers

HIDDEN, EXPERTS, CHOSEN, LAYERS = 6, 4, 2, 3


class Meeting:
    """Where the threads of a test exchange what engines would."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._all = threading.Barrier(size, timeout=20)
        self._brought: dict[int, Any] = {}

    def exchange(self, rank: int, brought: Any) -> list[Any]:
        self._brought[rank] = brought
        self._all.wait()
        found = [self._brought[each] for each in range(self.size)]
        self._all.wait()
        return found


class Exchange:
    """One thread's; `told` has the sizes of each pass."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting
        self.told: list[list[int]] = []

    def sizes(self, rows: int) -> list[int]:
        self.told.append(self._meeting.exchange(self.rank, rows))
        return self.told[-1]

    def gather(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        assert rows.dtype is torch.uint8
        found = self._meeting.exchange(self.rank, rows)
        assert [len(each) for each in found] == list(sizes)
        return torch.cat(found)

    def reduce(self, parts: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        whole = sum(self._meeting.exchange(self.rank, parts))
        assert isinstance(whole, torch.Tensor)
        return whole.split(list(sizes))[self.rank]

    def most(self, values: Sequence[float]) -> list[float]:
        return [max(each) for each in zip(*self._meeting.exchange(self.rank, values), strict=True)]


class Experts(torch.nn.Module):
    """Experts `first` to `first + num_experts` of a layer, and a sentinel behind them that must weigh nothing."""

    def __init__(self, layer: int, first: int, count: int) -> None:
        super().__init__()
        drawn = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(layer))
        self.num_experts = count
        self.computed, self.idles = 0, False
        self.matrices = drawn[first : first + count]

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert not self.idles or torch.is_inference_mode_enabled()
        total = torch.zeros_like(hidden)
        for slot in range(CHOSEN):
            here = experts[:, slot] < self.num_experts
            assert not weights[~here, slot].any() and experts.max() <= self.num_experts
            self.computed += int(here.sum())
            made = torch.einsum("nh,nho->no", hidden[here], self.matrices[experts[here, slot]])
            total[here] += weights[here, slot, None] * made
        return total


def model(exchange: Any) -> tuple[ExpertLayers, list[Any]]:
    """Layers of one engine, installed from the last to the first, to see that they are sorted."""
    count = EXPERTS // exchange.size
    modules: list[Any] = [Experts(layer, exchange.rank * count, count) for layer in range(LAYERS)]
    layers = ExpertLayers(exchange)
    for each in reversed(modules):
        each.forward = layers.implementation(each, None, None)
    layers.arrange(torch.nn.ModuleList(modules))
    return layers, modules


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    experts = torch.rand(count, EXPERTS, generator=rng).argsort(dim=1)[:, :CHOSEN]
    return torch.randn(count, HIDDEN, generator=rng), experts, torch.rand(count, CHOSEN, generator=rng)


def passed(modules: list[Any], given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    hidden, experts, weights = given
    for each in modules:
        hidden = each(hidden, experts, weights)
    return hidden


def together(*works: Callable[[Exchange], Any]) -> list[Any]:
    """What each of `works` returns, each on a thread of its own with an exchange of its own."""
    meeting = Meeting(len(works))
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work, Exchange(meeting, rank)) for rank, work in enumerate(works)]
        return [each.result() for each in futures]


@pytest.mark.parametrize("counts", [(5, 5), (1, 7), (9, 2)], ids=str)
def test_each_gets_what_all_experts_make_of_its_rows(counts: tuple[int, int]) -> None:
    def work(exchange: Exchange) -> tuple[torch.Tensor, int]:
        _, modules = model(exchange)
        # Columns first: what comes of a layer need not be contiguous.
        hidden, *others = rows(counts[exchange.rank], exchange.rank)
        return passed(modules, (hidden.T.contiguous().T, *others)), sum(each.computed for each in modules)

    for rank, (found, _) in enumerate(results := together(work, work)):
        whole = [Experts(layer, 0, EXPERTS) for layer in range(LAYERS)]
        torch.testing.assert_close(found, passed(whole, rows(counts[rank], rank)))
    assert sum(computed for _, computed in results) == sum(counts) * CHOSEN * LAYERS, "each row by the experts it chose"


def test_an_engine_without_rows_has_its_part_in_each_layer() -> None:
    def busy(exchange: Exchange) -> torch.Tensor:
        _, modules = model(exchange)
        passed(modules, rows(2, 7))
        found = passed(modules, rows(4, 8))
        assert exchange.told == [[2, 3], [4, 0]], "once for each pass"
        return found

    def idle(exchange: Exchange) -> None:
        layers, modules = model(exchange)
        passed(modules, rows(3, 9))
        for each in modules:
            each.idles = True
        layers.idle()

    whole = [Experts(layer, 0, EXPERTS) for layer in range(LAYERS)]
    torch.testing.assert_close(together(busy, idle)[0], passed(whole, rows(4, 8)))


def test_a_layer_out_of_order_is_noticed() -> None:
    _, modules = model(Exchange(Meeting(1), 0))
    modules[0](*rows(2, 1))
    with pytest.raises(InvariantViolation, match=r"expert_layers.*place=2"):
        modules[2](*rows(2, 1))


@pytest.mark.parametrize("count", [1, 3])
def test_other_rows_than_were_told_are_noticed(count: int) -> None:
    _, modules = model(Exchange(Meeting(1), 0))
    modules[0](*rows(2, 1))
    with pytest.raises(InvariantViolation, match=rf"expert_layers.*rows={count}"):
        modules[1](*rows(count, 1))
