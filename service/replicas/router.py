"""Chooses the engine of a request: by the work that each has, and by what each has computed before.

All requests of a server pass here, so the router knows what every engine has without asking. The cost of an engine is
counted in prompt tokens, as in NVIDIA Dynamo's router (tokens to compute, and tokens held by what is decoding), with a
price for rows: a step costs more for every row that decodes, however short.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from service.replicas.prompt_pieces import PIECE_TOKENS, Prompt, SeenPieces

ROW_TOKENS: Final = 64
"""What a row costs, in prompt tokens: a row of a step costs about as much as one prompt token, and an answer has some
hundred tokens, of which about half are still to come."""
HELD_PER_TOKEN: Final = 8
"""Tokens whose keys a step reads at the price of one prompt token, over the rest of an answer."""
SEEN_PIECES: Final = 1 << 14
"""Pieces that are remembered of an engine whose cache is of a size not known yet: a million tokens."""


@dataclass(slots=True)
class Book:
    """The work of one engine that has not ended."""

    rows: int = 0
    prefill: int = 0
    """Prompt tokens that may have to be computed still."""
    held: int = 0
    """Tokens of prompts and of outputs so far."""
    seen: SeenPieces = field(default_factory=lambda: SeenPieces(SEEN_PIECES))
    routed: int = 0
    """Requests so far."""
    matched: int = 0
    """Of these, those whose beginning it had been sent before."""

    def cost(self, uncached: int) -> float:
        """What a prompt of `uncached` tokens not computed yet would wait for, and itself."""
        return self.prefill + uncached + ROW_TOKENS * self.rows + self.held / HELD_PER_TOKEN


class Share:
    """The part of one request in the book of its engine. `end` takes it out, once."""

    __slots__ = ("_book", "_held", "_prefill", "_prompt", "_rows", "begun", "ended")

    def __init__(self, book: Book, rows: int, prompt: Prompt, uncached: int) -> None:
        self._book, self._rows, self._held, self._prefill = book, rows, prompt.tokens, uncached
        self._prompt = prompt
        self.begun = self.ended = False
        book.rows += rows
        book.held += prompt.tokens
        book.prefill += uncached

    def taken(self) -> None:
        """The engine has taken the request, and will have computed its prompt."""
        book = self._book
        book.routed += 1
        book.matched += book.seen.leading(self._prompt.pieces) > 0
        book.seen.add(self._prompt.pieces)

    def correct(self, tokens: int) -> None:
        """Its prompt has so many tokens: before, that was an estimate."""
        self.grow(tokens - self._prompt.tokens)

    def begin(self) -> None:
        """Its prompt is computed."""
        if not self.begun:
            self.begun = True
            self._book.prefill -= self._prefill
            self._prefill = 0

    def grow(self, tokens: int) -> None:
        """It holds `tokens` more."""
        if not self.ended:
            self._held += tokens
            self._book.held += tokens

    def end(self) -> None:
        """It holds nothing any more. Idempotent."""
        if not self.ended:
            self.begin()
            self.ended = True
            self._book.rows -= self._rows
            self._book.held -= self._held


class Router:
    """The books of all engines, by place."""

    def __init__(self, count: int) -> None:
        self.books = tuple(Book() for _ in range(count))

    def order(self, prompt: Prompt, places: Iterable[int]) -> list[int]:
        """`places`, the cheapest for `prompt` first; of equal ones that which was sent the fewest requests."""
        return sorted(places, key=lambda place: (self._cost(prompt, place), self.books[place].routed, place))

    def take(self, place: int, prompt: Prompt, rows: int) -> Share:
        """Note that the engine at `place` is asked to take a request of `rows` sequences."""
        return Share(self.books[place], rows, prompt, self._uncached(prompt, place))

    def forget(self) -> None:
        """The prefix caches of all engines are empty."""
        for book in self.books:
            book.seen.clear()

    def _cost(self, prompt: Prompt, place: int) -> float:
        return self.books[place].cost(self._uncached(prompt, place))

    def _uncached(self, prompt: Prompt, place: int) -> int:
        return max(0, prompt.tokens - PIECE_TOKENS * self.books[place].seen.leading(prompt.pieces))
