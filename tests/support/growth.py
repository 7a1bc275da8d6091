"""How much longer work takes on a larger input, on a machine that does other things too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

Work = Callable[[], object]


def seconds(work: Work) -> float:
    """Processor time that one run takes of this thread, with the collector held back."""
    gc.disable()
    try:
        start = time.thread_time()
        work()
        return time.thread_time() - start
    finally:
        gc.enable()


def growth(make: Callable[[int], Work], small: int, large: int, most: float) -> float:
    """How many times longer `make(large)` takes than `make(small)`; what they do to get ready is not counted.

    Both are run in turns, at least 4 and at most 16 times, until the best of each are well below `most`: one
    undisturbed run of each is enough to show that the work is not to blame.
    """
    best = {small: float("inf"), large: float("inf")}
    for turn in range(16):
        for size in best:
            best[size] = min(best[size], seconds(make(size)))
        if turn >= 3 and best[large] / best[small] < 0.85 * most:
            break
    print(f"{make.__name__}: {best[small] * 1e3:.2f} ms at {small}, {best[large] * 1e3:.2f} ms at {large}")
    return best[large] / best[small]
