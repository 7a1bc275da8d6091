"""A capture that fails costs graphs and says why, whatever raised it; nothing else of the engine is lost."""

from __future__ import annotations

import logging

import pytest

from core.executor.capture import CaptureProgress, captured


class OutOfResources(Exception):
    """What Triton raises for a kernel that does not fit the device is no RuntimeError either."""


@pytest.mark.parametrize("kind", [RuntimeError, OutOfResources])
def test_steps_that_cannot_be_captured_are_launched(kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    def refused(progress: CaptureProgress) -> None:
        progress(1, 2)
        raise kind("no kernel for this\nand more of it")

    with caplog.at_level(logging.INFO):
        try:
            found = captured("steps with prompts", "all of them", refused)
        except kind:
            pytest.fail("the engine does not start")
    assert not found
    assert caplog.messages == ["steps with prompts are not captured: no kernel for this"]


def test_what_was_captured_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert captured("decode steps", "decode steps of up to 8 rows", lambda progress: None)
    (told,) = caplog.messages
    assert told.startswith("captured decode steps of up to 8 rows in ")
