"""The FutureMap in plain integers, for most of the seeds; `test_relay_twin` drives it beside the real one.

The real map costs a dozen small tensor operations per step, which is nothing beside a model and everything beside a
fake one. A share of the seeds runs the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import ne

UNWRITTEN = -1


class RelayTwin:
    """Same methods, same buffers, same counters in COUNT mode; rows and values are lists."""

    def __init__(self, num_rows: int) -> None:
        self.tokens = [0] + [UNWRITTEN] * (num_rows - 1)
        self.lens = [0] * num_rows
        self.counts = [0, 0]
        """Violations in the order of `DEVICE_CHECKS`: unwritten reads, lengths that differ."""
        self.drafts: list[list[int]] = [[]] * num_rows
        """Of each row, those that its column of lengths counts."""

    def publish(self, rows: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Write new lengths."""
        for row, length in zip(rows, seq_lens, strict=True):
            self.lens[row] = length

    def stash(self, rows: Sequence[int], tokens: Sequence[int], drafts: Sequence[list[int]] | None = None) -> None:
        """Write new tokens, and the drafts behind each where there can be any."""
        for row, token in zip(rows, tokens, strict=True):
            self.tokens[row] = token
        for row, each in zip(rows, drafts or (), strict=drafts is not None):
            self.drafts[row] = each

    def lengths(self, rows: Sequence[int], lower: Sequence[int], upper: Sequence[int]) -> list[int]:
        """The published length of each row; one outside its bounds counts, and reads as the nearer bound."""
        published = [self.lens[row] for row in rows]
        allowed = [min(max(p, low), high) for p, low, high in zip(published, lower, upper, strict=True)]
        self.counts[1] += sum(map(ne, published, allowed))
        return allowed

    def gather(self, rows: Sequence[int]) -> list[int]:
        """The newest token of each row, consumed by this read; an unwritten one counts, and reads as 0."""
        if not rows:
            return []
        found = [self.tokens[row] for row in rows]
        self.counts[0] += sum(token < 0 for token in found)
        for row in rows:
            self.tokens[row] = UNWRITTEN
        self.tokens[0] = 0
        return [max(token, 0) for token in found]

    def forget(self, rows: Sequence[int]) -> None:
        """Mark rows as unwritten."""
        for row in rows:
            self.tokens[row] = UNWRITTEN
            self.lens[row] = 0
            self.drafts[row] = []
        if rows:
            self.tokens[0] = 0
