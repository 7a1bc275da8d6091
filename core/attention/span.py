"""Which keys a query may see: everything up to itself, or only a window, or only its own chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Causal visibility. `window` w: the last w keys, the query's own included (Mistral, Gemma, gpt-oss). `chunk` c:
    keys in the same block of c positions as the query: key // c == query // c (Llama 4). None: no such limit.

    One definition for every backend, and for the check that a model's own mask says the same.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, self.window
        assert self.chunk is None or self.chunk >= 1, self.chunk

    def first_key(self, query: int) -> int:
        """Position of the oldest key that the query at position `query` sees."""
        first = 0
        if self.window is not None:
            first = max(first, query - self.window + 1)
        if self.chunk is not None:
            first = max(first, query // self.chunk * self.chunk)
        return first

    def is_plain(self, length: int) -> bool:
        """Whether a sequence of `length` tokens is too short for window and chunk to hide anything."""
        return length == 0 or self.first_key(length - 1) == 0

    def allows(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool, broadcast over the positions `queries` and `keys` (integer tensors): whether the query sees the key."""
        seen = keys <= queries
        if self.window is not None:
            seen = seen & (keys > queries - self.window)
        if self.chunk is not None:
            seen = seen & (keys // self.chunk == queries // self.chunk)
        return seen
