"""Counts work instead of timing it: bytecodes that Python executes, and the most memory that a piece of work takes.

Both are the same on any machine, busy or not, but for what other threads allocate. Bytecodes show loops in Python,
memory shows arrays that grow (numpy tells tracemalloc of its own). What neither shows is a loop in C over things that
are there already.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from service.bench.curve import exponent

Work = Callable[[], object]


class _Opcodes:
    """A trace function that is called at each bytecode of every frame that is entered under it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> _Opcodes:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self


def opcodes(work: Work) -> int:
    """Bytecodes that `work()` executes."""
    counter, before = _Opcodes(), sys.gettrace()
    sys.settrace(counter)
    try:
        work()
    finally:
        sys.settrace(before)
    return counter.count


def peak_bytes(work: Work) -> int:
    """The most memory that `work()` has beside what was there before it."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def least_peak_bytes(make: Callable[[], Work]) -> int:
    """`peak_bytes(make())`, the least of five: threads that other tests left allocate meanwhile, none takes away."""
    return min(peak_bytes(make()) for _ in range(5))


def growth(count: Callable[[Work], int], make: Callable[[int], Work], sizes: Sequence[int]) -> float:
    """The exponent of `count(make(size))`, fitted over `sizes`; printed, so that a failure tells the counts."""
    if count is peak_bytes:
        counts = [least_peak_bytes(partial(make, size)) for size in sizes]
    else:
        counts = [count(make(size)) for size in sizes]
    found = exponent(sizes, counts)
    print(f"{make.__name__}: {dict(zip(sizes, counts, strict=True))} {count.__name__}, exponent {found:.3f}")
    return found
