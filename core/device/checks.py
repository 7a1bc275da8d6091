"""Assertions on values that only the device has seen.

COUNT adds violations to a device counter and marks the row. Both travel to the host with the step's results, where the
row fails and the other rows go on. TRAP stops at once by `torch._assert_async`, always with a message: without one
`torch.compile` drops the assertion silently. OFF exists to measure what the others cost. The idea of consuming a value
by checking it and writing -1 back is SGLang #26108.

These are operations on tensors. `core.relay` does them all in one launch on GPUs, and in compiled code on the CPU.
"""

from __future__ import annotations

from enum import Enum

import torch

DEVICE_CHECKS: tuple[str, ...] = ("relay_unwritten_read", "relay_seq_len")
"""Names of the device counters, in the order of the counter tensor."""


class AssertMode(Enum):
    """What a violated device check does."""

    OFF = "off"
    COUNT = "count"
    TRAP = "trap"


class DeviceChecks:
    """Counters int64[len(DEVICE_CHECKS)] on the device, and the checks that feed them. Forward stream only."""

    def __init__(self, mode: AssertMode, device: torch.device) -> None:
        self.mode = mode
        self.counters = torch.zeros(len(DEVICE_CHECKS), dtype=torch.int64, device=device)

    def consume(self, buffer: torch.Tensor, rows: torch.Tensor, violated: torch.Tensor) -> torch.Tensor:
        """int64[n]: `buffer[rows]`. Values must be >= 0, and are replaced by -1 so that a second read is a violation.

        buffer: int64[R]; rows: int64[n]. Row 0 is exempt: it reads 0 and stays 0. In COUNT mode a violating value is
        returned as 0, a legal token id, so that the step goes on, and its entry of `violated`, int64[n], becomes 1; in
        TRAP mode it raises (CPU) or poisons the device context (CUDA).
        """
        values = buffer.index_select(0, rows)
        if self.mode is AssertMode.OFF:
            return values
        if self.mode is AssertMode.TRAP:
            torch._assert_async(
                (values >= 0).all(), "relay_unwritten_read: a row was read without a write since its last read"
            )
        unwritten = values < 0
        violated.logical_or_(unwritten)
        self.counters[0].add_(unwritten.sum())
        buffer.index_fill_(0, rows, -1)
        # Padded graph rows all read row 0: it must stay readable however often it is consumed.
        buffer[:1].zero_()
        return values.clamp_min_(0)

    def snapshot(self, violated: torch.Tensor) -> torch.Tensor:
        """int64[len(DEVICE_CHECKS) + n]: the counters as they stand here, then `violated`; empty when asserts are off.

        One tensor, so that the rows cost no transfer of their own. A copy, because the next step counts on while
        another stream brings this one to the host.
        """
        return self.counters[:0] if self.mode is AssertMode.OFF else torch.cat([self.counters, violated])

    def expect_same(self, actual: torch.Tensor, allowed: torch.Tensor, violated: torch.Tensor) -> None:
        """Check published sequence lengths, int64[n], against the same lengths cut to what the plan allows, int64[n].

        `violated`, int64[n], becomes 1 where they differ and 0 elsewhere.
        """
        if self.mode is AssertMode.OFF:
            return
        if self.mode is AssertMode.TRAP:
            torch._assert_async((actual == allowed).all(), "relay_seq_len: published length differs from the plan")
        self.counters[1].add_(torch.ne(actual, allowed, out=violated).sum())
