"""In which order work is warmed up, waited for and recorded, told by a stand-in for `torch.cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from core.device.graphs import WARM_UPS, CudaGraphs


class Stream:
    """The forward stream; writes down that it was waited for."""

    def __init__(self, story: list[str]) -> None:
        self._story = story

    def synchronize(self) -> None:
        self._story.append("waited")


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the stand-in was asked, in order."""
    told: list[str] = []
    pools = iter(range(1, 9))

    @contextmanager
    def recording(graph: object, *, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
        told.append(f"record in pool {pool}, {capture_error_mode}")
        yield
        told.append("recorded")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return told


def test_work_is_recorded_behind_its_warm_ups_in_one_pool_for_all(story: list[str]) -> None:
    """A thread that pins memory meanwhile is no mistake of the recording one, hence `thread_local`."""
    graphs = CudaGraphs(Stream(story))
    for _ in range(2):
        graphs.capture(lambda: story.append("work"))
    once = [*["work"] * WARM_UPS, "waited", "record in pool 1, thread_local", "work", "recorded"]
    assert story == once * 2
