"""The FutureMap's reads and writes of a step in compiled code, on the CPU.

They use the same tensors as the FutureMap's operations on tensors, in the same order, and leave the same values there.
So they can take over between two steps. The recorder is told by the FutureMap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from core.device.checks import AssertMode, DeviceChecks
from core.memory.req_to_token_pool import ReqToTokenPool


@dataclass(frozen=True, slots=True)
class Entered:
    """The n decode rows of a step as it begins, on the device, int64[n] each."""

    ids: torch.Tensor
    """The newest token of each row, consumed by this read."""
    lens: torch.Tensor
    """Tokens of each in the pools before this step, within the bounds of the plan."""
    after: torch.Tensor
    """Tokens of each in the pools after a step that computes its newest token alone."""
    slots: torch.Tensor | None = None
    """The KV slot of each newest token; None where it has to be looked up."""


class CompiledRelay:
    """One call of compiled code in place of each few operations on tensors, at a fraction of what these cost.

    Each operation on tensors also lets go of the interpreter, and gets it back only when the loop's thread lets go of
    it. Compiled code keeps it. Rows are int64[n], n > 0; tensors are contiguous.
    """

    def __init__(
        self,
        module: Any,
        tokens: torch.Tensor,
        lens: torch.Tensor,
        violated: torch.Tensor,
        checks: DeviceChecks,
        pool: ReqToTokenPool,
    ) -> None:
        """`module`: see `core.native.host`. `tokens`, `lens`, `violated`: int64[R], buffers of the FutureMap."""
        written = (tokens, lens, violated, checks.counters)
        assert pool.table.dtype == torch.int32 and pool.table.is_contiguous(), "read by address"
        addresses = (*(_address(each) for each in written), pool.table.data_ptr())
        # What is used by its address must outlive this object's calls.
        self._tensors = (*written, pool.table)
        self._mode = checks.mode
        self._relay = module.Relay(*addresses, pool.num_rows, pool.max_context_len)
        self._counters, self._violated = checks.counters.numpy(), violated.numpy()

    def enter(
        self, rows: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, after: torch.Tensor | None = None
    ) -> Entered:
        """See `FutureMap.enter`. Raises RuntimeError for a violation in TRAP mode, and IndexError."""
        at, mode = (_address(rows), _address(lower), _address(upper)), self._mode
        assert lower.numel() == upper.numel() == rows.numel(), (lower.shape, upper.shape, rows.shape)
        found = self._relay.enter(*at, rows.numel(), mode is not AssertMode.OFF, mode is AssertMode.TRAP)
        entered = Entered(*map(torch.from_numpy, found))
        return entered if after is None else replace(entered, after=after.copy_(entered.after))

    def publish(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Write lengths, any integer dtype, n entries, of `rows`. Raises IndexError."""
        if seq_lens.dtype != torch.int64:
            seq_lens = seq_lens.to(torch.int64)
        assert seq_lens.numel() == rows.numel(), (seq_lens.shape, rows.shape)
        self._relay.publish(_address(rows), _address(seq_lens), rows.numel())

    def stash(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write newest tokens, int64[n], of `rows`. Raises IndexError."""
        assert tokens.numel() == rows.numel(), (tokens.shape, rows.shape)
        self._relay.stash(_address(rows), _address(tokens), rows.numel())

    def snapshot(self, count: int) -> torch.Tensor:
        """See `DeviceChecks.snapshot`; of the first `count` flags."""
        if self._mode is AssertMode.OFF:
            return self._tensors[3][:0]
        return torch.from_numpy(np.concatenate((self._counters, self._violated[:count])))


def _address(values: torch.Tensor) -> int:
    assert values.dtype == torch.int64 and values.is_contiguous(), (values.dtype, values.stride())
    return values.data_ptr()
