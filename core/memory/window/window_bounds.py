"""How many pages a sliding window can need. Admission charges these numbers, and pools are sized by them."""

from __future__ import annotations

from dataclasses import dataclass

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class WindowBounds:
    """A query at position p sees keys p - window + 1 to p; a step computes at most `chunk` prompt tokens in all."""

    window: int
    page_size: int
    chunk: int
    doubt: int = 0
    """By how many tokens the most and the least may differ that a row can have once the steps in flight are over: as
    many as these steps verify drafts for it."""

    def __post_init__(self) -> None:
        assert min(self.window, self.page_size, self.chunk) >= 1 and self.doubt >= 0, self

    @property
    def per_row(self) -> int:
        """Most pages of one row in a step that computes one token of it, and drafts.

        Before the step the row holds the newest window - 1 tokens of the least that it may have, and all that may
        follow up to the most, `doubt` tokens later. At the worst alignment they lie in
        (window + doubt + page_size - 3) // page_size + 1 pages; the next token may be in one more.
        """
        return (self.window + self.doubt + self.page_size - 3) // self.page_size + 2

    @property
    def per_step(self) -> int:
        """Most pages that one step's prompt chunks need beyond `per_row` of each row, over all rows together."""
        return (self.chunk - 1) // self.page_size

    @property
    def alone(self) -> int:
        """Most pages that a single row, however long, ever holds."""
        return self.per_row + self.per_step

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def first_places(self, lens: Ints) -> Ints:
        """int64[n]: index, among its pages, of the first one that a row of `lens[i]` tokens (int64[n]) still needs.

        Its next token, at position lens[i], sees keys from lens[i] - window + 1 on.
        """
        places: Ints = (lens - self.window + 1).clip(0) // self.page_size
        return places
