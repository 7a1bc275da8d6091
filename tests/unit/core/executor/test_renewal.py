"""What ran steps is let go before other weights take its place: else two of both would be there."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from core.executor.forward_thread import ForwardThread
from core.executor.inline import InlineExecutor


class Runner:
    """Of no steps."""


@pytest.mark.parametrize("kind", [ForwardThread, InlineExecutor])
def test_nothing_refers_to_the_runner_once_that_is_told(kind: Any) -> None:
    first, second = Runner(), Runner()
    gone = weakref.ref(first)
    executor = kind(first, lambda: None)
    try:
        del first
        executor.renew(None).result(30)
        gc.collect()
        assert gone() is None
        executor.renew(second).result(30)
        assert executor._running is second
    finally:
        executor.stop()
