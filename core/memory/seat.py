"""What `RequestMemory` answers: the row that a request was given, and a part of the prefix cache that must go."""

from __future__ import annotations

from dataclasses import dataclass

from core.prefix.node import PrefixNode


@dataclass(frozen=True, slots=True)
class Seat:
    """A row with pages for every token of the prompt; the first `cached_tokens` of them are already computed."""

    row: int
    generation: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """A part of the prefix cache that no request may find again, and the rows that read it, without the failed one."""

    node: PrefixNode | None
    """Where that part begins; None when the cache holds nothing of it."""
    readers: tuple[int, ...]
