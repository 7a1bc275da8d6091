"""Steps of padding before the first real one: which, what they leave, and a model that cannot take them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.executor.rehearsal import rehearse
from tests.support.fakes.masked_attention import MaskedAttention
from tests.support.fakes.traced_graphs import GraphStreams
from tests.unit.core.attention.dense import LAYER
from tests.unit.core.executor.test_decode_graphs import ROWS, SPEC, WIDTH, SumModel, World


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
    seen = rehearsing(monkeypatch, [[], [WIDTH], [WIDTH + 1], [WIDTH - 1, 1, 1]])
    world = World()
    wanted = [("DECODE", 0, [1]), ("EXTEND", 1, [WIDTH]), ("EXTEND", 3, [WIDTH - 1, 1, 1])]
    assert seen[:3] == wanted, "none that has no place"
    assert not world.pool.table.any() and not world.checks.counters.any()
    assert not world.kv.k(LAYER)[1:].any(), "slot 0 is padding"


def test_whole_texts_are_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of whole texts attends by itself, and a step without one is nothing it knows."""
    seen = rehearsing(monkeypatch, [[], [2]])
    World(spec=replace(SPEC, whole_prompts=True, capturable=False))
    assert not seen


def test_it_runs_where_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the forward stream and without gradients; and it is over when the engine is built."""
    told: list[str] = []

    class Told(GraphStreams):
        @contextmanager
        def on_forward(self) -> Iterator[None]:
            told.append("forward stream")
            yield
            told.append("end")

        def synchronize(self) -> None:
            told.append("waits")

    rehearsing(monkeypatch, [[2], []])
    forward = SumModel.forward

    def watched(self: SumModel, batch: Any) -> torch.Tensor:
        told.append("gradients" if torch.is_grad_enabled() else "step")
        return forward(self, batch)

    monkeypatch.setattr(SumModel, "forward", watched)
    World(Told())
    assert told[:6] == ["waits", "forward stream", "step", "step", "end", "waits"]


class OutOfResources(Exception):
    """What Triton raises for a kernel that does not fit the device is no RuntimeError either."""


@pytest.mark.parametrize("kind", [RuntimeError, OutOfResources])
def test_a_model_that_fails_then_is_served_all_the_same(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rehearsing(monkeypatch, [[], [2]])
    forward = SumModel.forward

    def refused(self: SumModel, batch: Any) -> torch.Tensor:
        if batch.num_extend:
            raise kind("no kernel for this\nand more of it")
        return forward(self, batch)

    monkeypatch.setattr(SumModel, "forward", refused)
    with caplog.at_level(logging.WARNING):
        try:
            world = World()
        except kind:
            pytest.fail("the engine does not start")
    assert caplog.messages == ["kernels are compiled by the first steps: no kernel for this"]
    world.start([1], [4], 4)
    assert len(world.step([1])) == 1


def test_with_other_processes_it_fails_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait in the middle of what this one gave up."""
    rehearsing(monkeypatch, [[2]])
    state = World().runner.state

    def refused(self: SumModel, batch: Any) -> torch.Tensor:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(SumModel, "forward", refused)
    rehearse(state)
    with pytest.raises(RuntimeError, match="no kernel"):
        rehearse(replace(state, alone=False))
