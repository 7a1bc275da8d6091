"""How many pages a sliding window can need: what admission charges, and what pools are sized by."""

from __future__ import annotations

from dataclasses import dataclass

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class WindowBounds:
    """A query at position p sees keys p - window + 1 to p; a step computes at most `chunk` prompt tokens in all."""

    window: int
    page_size: int
    chunk: int

    def __post_init__(self) -> None:
        assert min(self.window, self.page_size, self.chunk) >= 1, self

    @property
    def per_row(self) -> int:
        """Most pages of one row in a step that computes one token of it, or the tokens of one more page.

        Before the step it holds window - 1 tokens, which touch one page more than they would fill if they lie badly.
        """
        return (self.window + self.page_size - 3) // self.page_size + 2

    @property
    def per_step(self) -> int:
        """Pages of one step's prompt chunks beyond those of `per_row`, over all rows together."""
        return (self.chunk - 1) // self.page_size

    @property
    def alone(self) -> int:
        """Most pages that a single row, however long, ever holds."""
        return self.per_row + self.per_step

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def first_places(self, lens: Ints) -> Ints:
        """int64[n]: the first page that a row of `lens[i]` tokens needs from here on, counted from its start."""
        places: Ints = (lens - self.window + 1).clip(0) // self.page_size
        return places
