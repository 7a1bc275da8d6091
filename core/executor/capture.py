"""What captured steps of every kind have in common: their padding, how sizes are recorded, what the log says of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from core.device.graphs import Graph, GraphMaker
from core.executor.device_state import DeviceState
from core.types.arrays import Ints

logger = logging.getLogger(__name__)

NO_LENGTHS: Ints = np.empty(0, np.int64)
"""Host lengths of a captured batch. Real ones would be frozen by the capture, so code that reads them must fail now."""

CaptureProgress = Callable[[int, int], None]
"""Called with (sizes captured so far, all sizes)."""

Size = TypeVar("Size", bound=Hashable)


def padded(values: Ints, size: int, padding: int = 0) -> tuple[Ints, Ints]:
    """`values`, and what fills them up to `size`: in rows, positions and slots that is 0 (law 6)."""
    assert len(values) <= size, (len(values), size)
    return values, np.full(size - len(values), padding, np.int64)


def record(
    state: DeviceState,
    maker: GraphMaker,
    sizes: Sequence[Size],
    work: Callable[[Size], Callable[[], None]],
    progress: CaptureProgress | None = None,
) -> dict[Size, Graph]:
    """A graph of `work(size)` for each of `sizes`, the largest first, so that smaller ones reuse the memory it took.

    `work` fills its inputs with padding: a capture runs the step, and padded rows write to padding only. Raises
    RuntimeError when the model waits for the device in its forward pass.
    """
    graphs: dict[Size, Graph] = {}
    with state.streams.on_forward():
        for done, size in enumerate(sizes, start=1):
            graphs[size] = maker.capture(work(size))
            if progress is not None:
                progress(done, len(sizes))
    state.streams.synchronize()
    return graphs


def captured(steps: str, which: str, capture: Callable[[CaptureProgress], None]) -> bool:
    """Whether `capture` succeeded. `steps` says what could not be captured in the log, `which` what was, and how long.

    Some expert layers wait for the device inside the forward pass: such a model runs without graphs. So does one with a
    kernel that does not fit the device, of which Triton raises errors that are no RuntimeErrors.
    """
    began = time.monotonic()
    try:
        capture(lambda done, total: logger.debug("captured %d of %d sizes: %s", done, total, steps))
    except Exception as error:
        logger.warning("%s are not captured: %s", steps, str(error).partition("\n")[0])
        return False
    logger.info("captured %s in %.1f s", which, time.monotonic() - began)
    return True
