"""Work that is recorded once and launched again as a whole: the device's part of captured decode steps.

Only CUDA has it. What stands in for it on the CPU belongs to the tests, and is stricter than the real thing: it replays
the recorded operations on the recorded memory, as a graph does, and spoils everything that a graph does not own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

WARM_UPS = 2
"""Plain runs before a recording: libraries choose kernels, compilers compile and allocators settle in them."""


class Graph(Protocol):
    """Recorded work: the same kernels on the same addresses, whatever these hold now."""

    def replay(self) -> None:
        """Launch it on the current stream; returns at once."""


class GraphMaker(Protocol):
    """Records graphs that share one pool of memory, so what one leaves in it lasts until the next replay of any."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` to warm up, then record it. It must not wait for the device; RuntimeError where it does.

        Called on the stream that replays. What `work` reads or writes beyond memory that it allocates itself must stay
        where it is for as long as the graph is used.
        """
        ...


class CudaGraphs:
    """The `GraphMaker` of one forward stream, on CUDA."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `GraphMaker.capture`."""
        for _ in range(WARM_UPS):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads pin memory whenever they like; the default mode would take that for a mistake of this one.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph
