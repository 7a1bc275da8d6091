"""Compiled constraints, kept for requests that bring them again. The least recently used is given up first."""

from __future__ import annotations

from collections import OrderedDict

from core.types.constraint import Constraint
from core.types.grammar import Grammar

BASE_BYTES = 64 << 10
BYTES_PER_CHAR = 64
"""An entry counts as 64 KiB at least, and 64 bytes for each character of its source, however little its compile was
seen to take: lexers grow while they are used."""


class GrammarCache:
    """Entries of at most `max_bytes` in all. Used on the loop thread. A grammar in use outlives its entry."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.hits = 0
        self.evictions = 0
        self._entries: OrderedDict[Constraint, tuple[Grammar, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, constraint: Constraint) -> Grammar | None:
        """The grammar of `constraint`, which becomes the most recently used; None if it is not cached."""
        entry = self._entries.get(constraint)
        if entry is None:
            return None
        self._entries.move_to_end(constraint)
        self.hits += 1
        return entry[0]

    def put(self, constraint: Constraint, grammar: Grammar, measured_bytes: int) -> None:
        """Keep `grammar` if it fits at all, and give up others until everything fits.

        `measured_bytes`: by how much its compile let the trial process grow.
        """
        size = max(measured_bytes, BASE_BYTES) + BYTES_PER_CHAR * len(constraint.source)
        self._drop(constraint)
        if size > self.max_bytes:
            return
        while self.used_bytes + size > self.max_bytes:
            self._drop(next(iter(self._entries)))
            self.evictions += 1
        self._entries[constraint] = (grammar, size)
        self.used_bytes += size

    def _drop(self, constraint: Constraint) -> None:
        entry = self._entries.pop(constraint, None)
        if entry is not None:
            self.used_bytes -= entry[1]
