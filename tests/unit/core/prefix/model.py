"""A prefix cache as a plain dict: slow, obvious, and the judge of the real ones.

A prefix is the tuple of its pages' words; `pages` maps every held prefix to the number of its last page. Recency is
kept per page. A use stamps all pages of one path that nobody locks, so equal stamps always lie on one path, and "oldest
first, deepest first among equals" is the exact order in which a tree of such paths must be evicted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

Prefix = tuple[str, ...]
"""(salt, word of page 0, word of page 1, …)."""


@dataclass
class ModelCache:
    pages: dict[Prefix, int] = field(default_factory=dict)
    stamps: dict[Prefix, int] = field(default_factory=dict)
    holds: Counter[Prefix] = field(default_factory=Counter)
    clock: int = 0

    def longest(self, whole: Prefix, limit: int) -> Prefix:
        """The longest held prefix of `whole` with at most `limit` pages."""
        depth = 0
        while depth < min(limit, len(whole) - 1) and whole[: depth + 2] in self.pages:
            depth += 1
        return whole[: depth + 1]

    def numbers(self, prefix: Prefix) -> list[int]:
        return [self.pages[prefix[:end]] for end in range(2, len(prefix) + 1)]

    def locked(self) -> set[Prefix]:
        return {held[:end] for held, count in self.holds.items() if count for end in range(2, len(held) + 1)}

    def use(self, prefix: Prefix) -> None:
        self.clock += 1
        locked = self.locked()
        for end in range(2, len(prefix) + 1):
            if prefix[:end] not in locked:
                self.stamps[prefix[:end]] = self.clock

    def lock(self, prefix: Prefix) -> None:
        self.holds[prefix] += 1

    def unlock(self, prefix: Prefix) -> None:
        before = self.locked()
        self.holds[prefix] -= 1
        self.clock += 1
        for each in before - self.locked():
            self.stamps[each] = self.clock

    def insert(self, whole: Prefix, numbers: list[int], owned: int) -> tuple[int, list[int]]:
        """(adopted, duplicates)."""
        adopted, duplicates = 0, []
        for place, number in enumerate(numbers):
            prefix = whole[: place + 2]
            if prefix not in self.pages:
                self.pages[prefix] = number
                adopted += 1
            elif place >= owned and self.pages[prefix] != number:
                duplicates.append(number)
        self.use(whole)
        return adopted, duplicates

    def evict(self, count: int) -> list[int]:
        locked = self.locked()
        free = [prefix for prefix in self.pages if prefix not in locked]
        free.sort(key=lambda prefix: (self.stamps[prefix], -len(prefix)))
        return [self._remove(prefix) for prefix in free[: max(count, 0)]]

    def _remove(self, prefix: Prefix) -> int:
        del self.stamps[prefix]
        return self.pages.pop(prefix)
