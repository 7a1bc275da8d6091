"""Work that is recorded once and launched again as a whole: the device's part of captured decode steps.

Only CUDA has it. The tests have a substitute for the CPU, which is stricter: it replays the recorded operations on the
recorded memory, as a graph does, and overwrites everything that a graph does not own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

WARM_UPS = 2
"""Plain runs before a recording, in which libraries choose kernels, compilers compile and allocators settle."""


class Graph(Protocol):
    """Recorded work: the same kernels on the same addresses, with the values that these hold at the replay."""

    def replay(self) -> None:
        """Launch the recorded work on the current stream; returns at once."""


class GraphMaker(Protocol):
    """Records graphs that share one pool of memory: what a replay leaves there lasts until the next replay of any."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` to warm up, then record it. Raises RuntimeError if `work` waits for the device.

        Called on the stream that replays. Memory that `work` reads or writes and did not allocate itself must keep its
        address for as long as the graph is used.
        """
        ...


class CudaGraphs:
    """The `GraphMaker` of one forward stream, on CUDA."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` `WARM_UPS` times, then record it into a CUDA graph of the shared pool."""
        for _ in range(WARM_UPS):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # "thread_local": in the default mode the capture fails when another thread pins memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph
