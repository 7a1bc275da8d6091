"""Compiled constraints that may be asked for again, the least recently used given up first."""

from __future__ import annotations

from collections import OrderedDict

from core.types.constraint import Constraint
from core.types.grammar import Grammar

BASE_BYTES = 64 << 10
BYTES_PER_CHAR = 64
"""What an entry costs at least, however little the system noticed: lexers grow while they are used."""


class GrammarCache:
    """At most `max_bytes` of entries. Used on the loop thread; grammars in use outlive their entry."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.hits = 0
        self.evictions = 0
        self._entries: OrderedDict[Constraint, tuple[Grammar, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, constraint: Constraint) -> Grammar | None:
        """The grammar, now the most recently used; None if it is not here."""
        entry = self._entries.get(constraint)
        if entry is None:
            return None
        self._entries.move_to_end(constraint)
        self.hits += 1
        return entry[0]

    def put(self, constraint: Constraint, grammar: Grammar, measured_bytes: int) -> None:
        """Keep a grammar, if it fits at all, and give up others until everything fits."""
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
