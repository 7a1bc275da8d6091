"""Log probabilities of many tokens in columns: 8 bytes per alternative, where Python objects take 130."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from core.types.io import TokenLogprob

NUMBER_BYTES = 4
ENTRY_BYTES = 3 * NUMBER_BYTES
"""Bytes of one token without its alternatives: id, log probability, and the end of its alternatives."""
ALTERNATIVE_BYTES = 2 * NUMBER_BYTES
CHOSEN_BYTES = NUMBER_BYTES


class TokenLogprobs(Sequence[TokenLogprob]):
    """Entries in the order of their tokens, each with its own number of alternatives, all with as many chosen ids.

    Columns, C int32 and float32: `ids` [T], `values` [T], `ends` [T] (number of alternatives up to and including the
    entry), `top_ids` and `top_values` [all alternatives], `chosen` [T x chosen ids]. A `TokenLogprob` is made when an
    entry is read, and not kept.
    """

    __slots__ = ("_chosen", "_ends", "_ids", "_top_ids", "_top_values", "_values")

    def __init__(self, entries: Iterable[TokenLogprob] = ()) -> None:
        self._ids, self._ends, self._top_ids = array("i"), array("i"), array("i")
        self._values, self._top_values, self._chosen = array("f"), array("f"), array("f")
        self.extend(entries)

    def add(self, token: int, value: float, top_ids: bytes, top_values: bytes, chosen: bytes = b"") -> None:
        """Append one token; its alternatives are the bytes of int32 ids and float32 log probabilities, best first.

        `chosen`: bytes of the float32 log probabilities of chosen ids, of as many for every token.
        """
        self._ids.append(token)
        self._values.append(value)
        self._top_ids.frombytes(top_ids)
        self._top_values.frombytes(top_values)
        self._chosen.frombytes(chosen)
        self._ends.append(len(self._top_ids))

    def extend(self, entries: Iterable[TokenLogprob]) -> None:
        """Append `entries`; column by column if they are `TokenLogprobs`."""
        if isinstance(entries, TokenLogprobs):
            before = len(self._top_ids)
            self._ids += entries._ids
            self._values += entries._values
            self._top_ids += entries._top_ids
            self._top_values += entries._top_values
            self._chosen += entries._chosen
            self._ends.extend(before + end for end in entries._ends)
            return
        for each in entries:
            self._ids.append(each.token_id)
            self._values.append(each.logprob)
            self._top_ids.extend(token for token, _ in each.top)
            self._top_values.extend(value for _, value in each.top)
            self._chosen.extend(each.chosen)
            self._ends.append(len(self._top_ids))

    @property
    def held_bytes(self) -> int:
        """Bytes that the columns take, room to grow included."""
        columns = (self._ids, self._values, self._ends, self._top_ids, self._top_values, self._chosen)
        return sum(map(sys.getsizeof, columns))

    def moved(self) -> TokenLogprobs:
        """A new object with all entries, moved without a copy; `self` is empty afterwards."""
        taken = TokenLogprobs()
        for name in self.__slots__:
            column = getattr(self, name)
            setattr(self, name, getattr(taken, name))
            setattr(taken, name, column)
        return taken

    def cut(self, count: int) -> None:
        """Drop all entries but the first `count`."""
        tops, chosen = self._top(count), count * self._width
        for column, size in (
            (self._ids, count),
            (self._values, count),
            (self._ends, count),
            (self._top_ids, tops),
            (self._top_values, tops),
            (self._chosen, chosen),
        ):
            del column[size:]

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, place: slice) -> TokenLogprobs: ...

    def __getitem__(self, place: int | slice) -> TokenLogprob | TokenLogprobs:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            return self._part(start, max(start, stop)) if step == 1 else TokenLogprobs([*self][place])
        at = range(len(self))[place]
        first, end = self._top(at), self._ends[at]
        top = zip(self._top_ids[first:end], self._top_values[first:end], strict=True)
        width = self._width
        chosen = tuple(self._chosen[at * width : (at + 1) * width])
        return TokenLogprob(self._ids[at], self._values[at], tuple(top), chosen)

    def __iter__(self) -> Iterator[TokenLogprob]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLogprobs | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(mine == others for mine, others in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenLogprobs({list(self)!r})"

    def _part(self, start: int, stop: int) -> TokenLogprobs:
        first, end = self._top(start), self._top(stop)
        part = TokenLogprobs()
        part._ids, part._values = self._ids[start:stop], self._values[start:stop]
        part._top_ids, part._top_values = self._top_ids[first:end], self._top_values[first:end]
        part._ends = array("i", (each - first for each in self._ends[start:stop]))
        part._chosen = self._chosen[start * self._width : stop * self._width]
        return part

    @property
    def _width(self) -> int:
        """Chosen ids of each entry."""
        return len(self._chosen) // len(self._ids) if self._ids else 0

    def _top(self, count: int) -> int:
        """How many alternatives the first `count` entries have."""
        return self._ends[count - 1] if count else 0
