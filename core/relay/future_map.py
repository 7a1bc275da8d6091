"""The FutureMap: values that step N produces on the device and step N+1 needs before the host knows them.

Indexed by request-pool row (SGLang #25862), so there is no ring to wrap and nothing to size: a row is unique among the
running requests, and its writes and reads are in one stream order. It is always on, overlap or not (law 8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core.device.checks import AssertMode, DeviceChecks
from core.device.event import Event
from core.device.streams import DeviceStreams
from core.invariants import check
from core.memory.req_to_token_pool import TABLE, ReqToTokenPool
from core.relay.compiled import CompiledRelay, Entered
from core.relay.payload import NEW_SEQ_LENS, OUTPUT_TOKENS, Column, RelayPayload

if TYPE_CHECKING:
    from core.relay.fused import FusedRelay


class FutureMap:
    """Columns over all rows of `pool`, padding row included. Every method runs on the forward stream (law 2).

    One step calls `enter` (inputs), then `publish` (lengths), then `stash` (tokens and extras), in this order. Publish
    comes before stash because planning needs only lengths and must not wait for tokens (law 9). What drafts may read
    and `carry` columns of its own between these two.
    """

    def __init__(
        self, pool: ReqToTokenPool, streams: DeviceStreams, checks: DeviceChecks, extras: Sequence[Column] = ()
    ) -> None:
        self.num_rows = pool.num_rows
        self._streams = streams
        self._recorder = streams.recorder
        self._checks = checks
        columns = (OUTPUT_TOKENS, NEW_SEQ_LENS, *extras)
        self._columns = {column.name: column for column in columns}
        check("relay_payload_shape", len(self._columns) == len(columns), columns=[c.name for c in columns])
        self._buffers = {c.name: pool.new_row_buffer(c.tail, c.dtype, c.fill) for c in columns}
        # Whatever `fill` is, padding row 0 must hold a valid token: padded rows gather it (law 6).
        for buffer in self._buffers.values():
            buffer[0] = 0
        # Allocated once and never moved: captured graphs write to its address.
        self._violated = torch.zeros_like(self._buffers[OUTPUT_TOKENS.name])
        self._pool = pool
        self._compiled: CompiledRelay | None = None
        self._fused: FusedRelay | None = None
        self._on_host: dict[str, np.ndarray] = {}
        """Columns of int64 in the host's own memory, once compiled code works for the CPU."""
        # CUDA builds of PyTorch normally bring Triton; a build without it enters by operations on tensors. A trap does
        # so everywhere: it stops before anything is consumed.
        fuses = streams.device.type == "cuda" and checks.mode is not AssertMode.TRAP
        if fuses and find_spec("triton") is not None:
            self.fuse()

    def buffer(self, name: str) -> torch.Tensor:
        """The column `name`, [R, *tail]; for tests and for captured graphs that need its address."""
        return self._buffers[name]

    def compile(self, module: Any) -> None:
        """On the CPU, have compiled code do the work from the next step on; `module`: see `core.native.host`."""
        buffers = (self._buffers[OUTPUT_TOKENS.name], self._buffers[NEW_SEQ_LENS.name], self._violated)
        self._compiled = CompiledRelay(module, *buffers, self._checks, self._pool)
        self._on_host = {name: held.numpy() for name, held in self._buffers.items() if held.dtype == torch.int64}

    def fuse(self) -> None:
        """Have one Triton kernel do the work of `enter` from the next step on: on CUDA, or where Triton interprets."""
        from core.relay.fused import FusedRelay

        buffers = (self._buffers[OUTPUT_TOKENS.name], self._buffers[NEW_SEQ_LENS.name], self._violated)
        self._fused = FusedRelay(*buffers, self._checks, self._pool)

    def publish(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> Event | None:
        """Write new lengths (any integer dtype) of `rows` and return a fresh event recorded after the write.

        `rows` int64[n] and `seq_lens` n entries. With n = 0 it returns None before it looks at any shape: an idle rank
        publishes nothing (SGLang #25473).
        """
        if rows.numel() == 0:
            return None
        self._check_rows(rows)
        if self._recorder is not None:
            self._recorder.wrote(NEW_SEQ_LENS.name, rows)
        if self._compiled is not None:
            self._compiled.publish(rows, seq_lens)
        else:
            self._buffers[NEW_SEQ_LENS.name].index_copy_(0, rows.view(-1), seq_lens.view(-1).to(torch.int64))
        event = self._streams.new_event()
        event.record(self._streams.forward)
        return event

    def stash(self, rows: torch.Tensor, payload: RelayPayload) -> None:
        """Write the step's tokens, and every extra that the payload carries, for `rows`, int64[n].

        Raises InvariantViolation for a wrong shape, and KeyError for an extra that was not declared.
        """
        if rows.numel() == 0:
            return
        self._check_rows(rows)
        if self._recorder is not None:
            for name in (OUTPUT_TOKENS.name, *payload.extras):
                self._recorder.wrote(name, rows)
        tokens = payload.tokens_flat(rows.numel())
        if self._compiled is not None:
            self._compiled.stash(rows, tokens)
        else:
            self._buffers[OUTPUT_TOKENS.name].index_copy_(0, rows, tokens)
        self._write(rows, payload.extras)

    def carry(self, rows: torch.Tensor, extras: Mapping[str, torch.Tensor]) -> None:
        """Write extras alone for `rows`, int64[n]: of rows that have no new token, in the middle of a prompt, say.

        Raises as `stash` does.
        """
        if rows.numel() == 0:
            return
        self._check_rows(rows)
        if self._recorder is not None:
            for name in extras:
                self._recorder.wrote(name, rows)
        self._write(rows, extras)

    def _write(self, rows: torch.Tensor, extras: Mapping[str, torch.Tensor]) -> None:
        for name, values in extras.items():
            column = self._columns[name]
            expected = (rows.numel(), *column.tail)
            check("relay_payload_shape", tuple(values.shape) == expected, column=name, shape=tuple(values.shape))
            if (held := self._on_host.get(name)) is not None:
                held[rows.numpy()] = values.to(column.dtype).numpy()
            else:
                self._buffers[name].index_copy_(0, rows, values.to(column.dtype))

    def enter(
        self, rows: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, after: torch.Tensor | None = None
    ) -> Entered:
        """What a step begins with: `lengths`, then `gather`, of its decode rows, int64[n] as the bounds.

        Lengths come first: `gather` adds to the violations that they have found. `after`, int64[n]: where lengths after
        the step are left, for captured graphs; new memory if None.
        """
        at_once = self._compiled or self._fused
        if at_once is None or rows.numel() == 0:
            lens = self.lengths(rows, lower, upper)
            return Entered(self.gather(rows), lens, torch.add(lens, 1, out=after))
        if self._recorder is not None:
            self._recorder.read(NEW_SEQ_LENS.name, rows)
            self._recorder.wrote(OUTPUT_TOKENS.name, rows)
            self._recorder.read(TABLE, rows)
        return at_once.enter(rows, lower, upper, after)

    def lengths(self, rows: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
        """int64[n]: the published length of each of `rows`, int64[n], in tokens; reading does not consume it.

        `lower` and `upper`, int64[n]: the least and the most that the plan allows. A length outside means that the
        row's last step was not the one that the scheduler planned. It is a violation, and cut to these bounds: what the
        step computes from it stays in pages of the row's owner.
        """
        if rows.numel() == 0:
            return rows.new_empty(0, dtype=torch.int64)
        published = self.extra(NEW_SEQ_LENS.name, rows)
        allowed = torch.clamp(published, lower, upper)
        self._checks.expect_same(published, allowed, self.violated(rows.numel()))
        return allowed

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """int64[n]: the newest token of each of `rows`, int64[n], consumed by this read.

        `lengths` was called for the same rows before: this adds to the violations that it has found.
        """
        if rows.numel() == 0:
            return rows.new_empty(0, dtype=torch.int64)
        if self._recorder is not None:
            # The read consumes: it writes -1 back.
            self._recorder.wrote(OUTPUT_TOKENS.name, rows)
        return self._checks.consume(self._buffers[OUTPUT_TOKENS.name], rows, self.violated(rows.numel()))

    def violated(self, count: int) -> torch.Tensor:
        """int64[count]: for the first `count` rows of the last `gather`, 1 where token or length was wrong, else 0.

        A view, which the next `lengths` overwrites. Undefined when device asserts are off.
        """
        return self._violated[:count]

    def snapshot(self, count: int) -> torch.Tensor:
        """`DeviceChecks.snapshot` of the step's first `count` decode rows."""
        if self._compiled is not None:
            return self._compiled.snapshot(count)
        return self._checks.snapshot(self.violated(count))

    def extra(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """[n, *tail]: the column `name` of `rows`, int64[n], which the step has entered: `enter` looks at their range.

        Raises KeyError for a column that was not declared.
        """
        if self._recorder is not None:
            self._recorder.read(name, rows)
        # An operation on tensors lets go of the interpreter, and gets it back when the loop's thread lets go of it.
        if (held := self._on_host.get(name)) is not None:
            return torch.from_numpy(held[rows.numpy()])
        return self._buffers[name].index_select(0, rows)

    def forget(self, rows: torch.Tensor) -> None:
        """Mark `rows`, int64[n], as unwritten, so that device checks see a read before the next owner's first write."""
        if rows.numel() == 0:
            return
        for name, buffer in self._buffers.items():
            if self._recorder is not None:
                self._recorder.wrote(name, rows)
            buffer.index_fill_(0, rows, self._columns[name].fill)
        # Row 0 keeps a valid token even if it is among `rows`.
        self._buffers[OUTPUT_TOKENS.name][0] = 0

    def _check_rows(self, rows: torch.Tensor) -> None:
        # Duplicate rows make the order of an index_copy undefined; looking costs a sort and, on CUDA, a sync.
        if self._checks.mode is AssertMode.TRAP and self._streams.device.type == "cpu":
            real = rows[rows > 0]
            check("relay_rows_unique", len(torch.unique(real)) == len(real), rows=rows.tolist())
            check("relay_rows_range", bool(((rows >= 0) & (rows < self.num_rows)).all()), rows=rows.tolist())
