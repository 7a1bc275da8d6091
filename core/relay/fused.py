"""What a step begins with, as one launch on a GPU: lengths, tokens, their checks, and the slots of the tokens.

Operations on tensors take sixteen launches for it. A compiler of them (`torch.compile`) fuses most, but looks at
each call's arguments again, and compiles anew, seconds on the forward thread, for a batch of one row or a view that
begins elsewhere in memory. This kernel is compiled once: nothing that changes from step to step is part of what Triton
specialises it for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.device.checks import AssertMode, DeviceChecks
from core.memory.req_to_token_pool import ReqToTokenPool
from core.relay.compiled import Entered

BLOCK = 128
"""Rows of a program: one of each thread, so that nothing is spilled."""


# A batch of one row, and rows that begin at an odd place of an upload, would be worth another compilation to Triton.
# fmt: off
@triton.jit(
    do_not_specialize=["count", "num_rows", "width"],
    do_not_specialize_on_alignment=[
        "rows", "lower", "upper", "found", "after", "tokens", "lens", "violated", "counters", "table",
    ],
)
def _enter(
    rows, lower, upper, found, after, tokens, lens, violated, counters, table, count, num_rows, width,
    CHECKED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    # fmt: on
    """Program: BLOCK rows. A row that the relay does not have reads as unwritten, from nowhere."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    row = tl.load(rows + places, mask=inside, other=0)
    there = inside & (row >= 0) & (row < num_rows)

    published = tl.load(lens + row, mask=there, other=0)
    least = tl.load(lower + places, mask=inside, other=0)
    most = tl.load(upper + places, mask=inside, other=0)
    before = tl.minimum(tl.maximum(published, least), most)
    # Padded rows all read row 0. It is not loaded, so that none of them sees what another one writes there.
    token = tl.load(tokens + row, mask=there & (row > 0), other=0)
    token = tl.where(inside & (there == 0), -1, token)
    if CHECKED:
        unplanned, unwritten = (published != before) & inside, token < 0
        tl.store(violated + places, (unplanned | unwritten).to(tl.int64), mask=inside)
        wrong = tl.sum(unwritten.to(tl.int64), 0)
        tl.atomic_add(counters, wrong, mask=wrong > 0)
        wrong = tl.sum(unplanned.to(tl.int64), 0)
        tl.atomic_add(counters + 1, wrong, mask=wrong > 0)
        token = tl.maximum(token, 0)
        tl.store(tokens + row, tl.where(row > 0, -1, 0).to(tl.int64), mask=there)
    # No token may stand behind the end of a row: what is computed there goes to the padding slot.
    slot = tl.load(table + row * width + before, mask=there & (before >= 0) & (before < width), other=0)

    tl.store(found + places, token, mask=inside)
    tl.store(found + count + places, before, mask=inside)
    tl.store(found + 2 * count + places, slot.to(tl.int64), mask=inside)
    tl.store(after + places, before + 1, mask=inside)


@torch.library.custom_op("slipstream::enter_rows", mutates_args=("found", "after", "tokens", "violated", "counters"))
def enter_rows(
    found: torch.Tensor,
    after: torch.Tensor,
    rows: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
    violated: torch.Tensor,
    counters: torch.Tensor,
    table: torch.Tensor,
    checked: bool,
) -> None:
    """found: int64[3, n] (newest tokens, lengths before the step, KV slots), after: int64[n] (lengths behind it).

    rows, lower, upper: int64[n], n > 0. tokens, lens, violated: int64[R]; counters: int64[2]; table: int32[R, width].
    All contiguous. An operator, not a plain launch, so that whatever watches the dispatcher (PyTorch's stream
    sanitizer, recorded graphs) sees what it reads and writes.
    """
    count, (num_rows, width) = len(rows), table.shape
    # fmt: off
    _enter[(triton.cdiv(count, BLOCK),)](
        rows, lower, upper, found, after, tokens, lens, violated, counters, table, count, num_rows, width,
        CHECKED=checked, BLOCK=BLOCK,
    )
    # fmt: on


class FusedRelay:
    """The beginning of a step by one kernel. What follows the forward pass is one launch for each column anyway."""

    def __init__(
        self,
        tokens: torch.Tensor,
        lens: torch.Tensor,
        violated: torch.Tensor,
        checks: DeviceChecks,
        pool: ReqToTokenPool,
    ) -> None:
        """`tokens`, `lens`, `violated`: int64[R], buffers of the FutureMap.

        TRAP is not for it: a kernel's own assertion is compiled only for debugging, and would come after other programs
        of the launch have consumed their rows.
        """
        assert checks.mode is not AssertMode.TRAP, "a trap stops before anything is consumed"
        assert len(tokens) == len(lens) == len(violated) == len(pool.table), "one row each"
        self._buffers = tokens, lens, violated, checks.counters, pool.table
        self._checked = checks.mode is AssertMode.COUNT
        # Compiles the kernel now, and imports what PyTorch wants for the first call of an operator: seconds of a step.
        padding = torch.zeros(1, dtype=torch.int64, device=tokens.device)
        self.enter(padding, padding, padding)

    def enter(
        self, rows: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, after: torch.Tensor | None = None
    ) -> Entered:
        """See `FutureMap.enter`; n > 0. Rows that the relay does not have count as unwritten."""
        assert rows.shape == lower.shape == upper.shape, (rows.shape, lower.shape, upper.shape)
        assert 0 < len(rows) <= len(self._buffers[2]), "a flag for each row"
        found = rows.new_empty(3, len(rows))
        after = torch.empty_like(rows) if after is None else after
        enter_rows(found, after, rows, lower, upper, *self._buffers, self._checked)
        ids, lens, slots = found.unbind()
        return Entered(ids, lens, after, slots)
