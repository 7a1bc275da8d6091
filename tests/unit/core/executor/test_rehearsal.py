"""Steps of padding before the first real one: which, what they leave, and a model that cannot take them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.support.fakes.masked_attention import MaskedAttention
from tests.unit.core.attention.dense import LAYER
from tests.unit.core.executor.test_decode_graphs import ROWS, WIDTH, SumModel, World


def rehearsing(patch: pytest.MonkeyPatch, steps: list[list[int]]) -> list[tuple[str, int, list[int]]]:
    """What the model is asked for before anything is captured: the kind of step, its prompts, and their lengths."""
    seen: list[tuple[str, int, list[int]]] = []
    forward = SumModel.forward

    def watched(self: SumModel, batch: Any) -> torch.Tensor:
        seen.append((batch.mode.name, batch.num_extend, batch.seq_lens.tolist()))
        return forward(self, batch)

    patch.setattr(SumModel, "forward", watched)
    patch.setattr(MaskedAttention, "rehearsals", lambda self, rows, device: steps if rows == ROWS else [])
    return seen


def test_what_the_backend_names_is_run_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = rehearsing(monkeypatch, [[], [5], [WIDTH + 1], [3, 1, 1]])
    world = World()
    assert seen[:3] == [("DECODE", 0, [1]), ("EXTEND", 1, [5]), ("EXTEND", 3, [3, 1, 1])], "none that has no place"
    assert not world.pool.table.any() and not world.checks.counters.any()
    assert not world.kv.k(LAYER)[1:].any(), "slot 0 is padding"


def test_a_model_that_fails_then_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rehearsing(monkeypatch, [[], [2]])
    forward = SumModel.forward

    def refused(self: SumModel, batch: Any) -> torch.Tensor:
        if batch.num_extend:
            raise RuntimeError("no kernel for this\nand more of it")
        return forward(self, batch)

    monkeypatch.setattr(SumModel, "forward", refused)
    with caplog.at_level(logging.WARNING):
        world = World()
    assert caplog.messages == ["kernels are compiled by the first steps: no kernel for this"]
    world.start([1], [4], 4)
    assert len(world.step([1])) == 1
