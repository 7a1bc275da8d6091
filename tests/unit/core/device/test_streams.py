"""Which streams an engine gets, on a stand-in for a device whose driver hands handles out twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch

from core.device.streams import DeviceStreams, resolve_device
from core.errors import ConfigError
from core.invariants import InvariantViolation

DEFAULT = 0


def device_of(handles: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> torch.device:
    module = SimpleNamespace(
        Stream=lambda: SimpleNamespace(cuda_stream=next(handles)),
        default_stream=lambda: SimpleNamespace(cuda_stream=DEFAULT),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return torch.device("cuda")


def test_a_copy_stream_that_is_the_forward_or_the_default_one_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = DeviceStreams(device_of(iter([7, 7, DEFAULT, 7, 9, 9, 7, DEFAULT, 11]), monkeypatch))
    assert (streams.forward.cuda_stream, streams.copy.cuda_stream) == (7, 9)
    assert streams.transfer.cuda_stream == 11 and streams.transfer is streams.transfer


@pytest.mark.parametrize("handles", [chain([7], repeat(DEFAULT)), repeat(7), chain([DEFAULT], repeat(9))])
def test_streams_that_stay_the_same_are_a_violation(handles: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They would work, and copies would silently wait for the next forward."""
    device = device_of(iter(handles), monkeypatch)
    with pytest.raises(InvariantViolation, match="streams_distinct"):
        DeviceStreams(device)


def test_the_device_that_was_asked_for_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, found in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=available: there)
        assert resolve_device("auto").type == found and resolve_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        resolve_device("cuda")
