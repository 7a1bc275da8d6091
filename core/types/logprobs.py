"""Log probabilities of many tokens in columns: 8 bytes per alternative, where Python objects take 130."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from core.types.io import TokenLogprob

NUMBER_BYTES = 4
ENTRY_BYTES = 4 * NUMBER_BYTES
"""Bytes of one token alone: id, log probability, and the ends of its alternatives and of its chosen ids."""
ALTERNATIVE_BYTES = 2 * NUMBER_BYTES
CHOSEN_BYTES = NUMBER_BYTES


class TokenLogprobs(Sequence[TokenLogprob]):
    """Entries in the order of their tokens, each with its own numbers of alternatives and of chosen ids.

    Tokens of a prompt and those behind it may follow each other here, and only the latter have chosen ids.

    Columns, C int32 and float32: `ids` [T], `values` [T], `ends` and `chosen_ends` [T] (number of alternatives, and of
    chosen ids, up to and including the entry), `top_ids` and `top_values` [all alternatives], `chosen` [all chosen
    ids]. A `TokenLogprob` is made when an entry is read, and not kept.
    """

    __slots__ = ("_chosen", "_chosen_ends", "_ends", "_ids", "_top_ids", "_top_values", "_values")

    def __init__(self, entries: Iterable[TokenLogprob] = ()) -> None:
        self._ids, self._top_ids = array("i"), array("i")
        self._ends, self._chosen_ends = array("i"), array("i")
        self._values, self._top_values, self._chosen = array("f"), array("f"), array("f")
        self.extend(entries)

    def add(self, token: int, value: float, top_ids: bytes, top_values: bytes, chosen: bytes = b"") -> None:
        """Append one token; its alternatives are the bytes of int32 ids and float32 log probabilities, best first.

        `chosen`: bytes of the float32 log probabilities of chosen ids.
        """
        self._ids.append(token)
        self._values.append(value)
        self._top_ids.frombytes(top_ids)
        self._top_values.frombytes(top_values)
        self._chosen.frombytes(chosen)
        self._ends.append(len(self._top_ids))
        self._chosen_ends.append(len(self._chosen))

    def extend(self, entries: Iterable[TokenLogprob]) -> None:
        """Append `entries`; column by column if they are `TokenLogprobs`."""
        if isinstance(entries, TokenLogprobs):
            tops, chosen = len(self._top_ids), len(self._chosen)
            self._ids += entries._ids
            self._values += entries._values
            self._top_ids += entries._top_ids
            self._top_values += entries._top_values
            self._chosen += entries._chosen
            self._ends.extend(tops + end for end in entries._ends)
            self._chosen_ends.extend(chosen + end for end in entries._chosen_ends)
            return
        for each in entries:
            self._ids.append(each.token_id)
            self._values.append(each.logprob)
            self._top_ids.extend(token for token, _ in each.top)
            self._top_values.extend(value for _, value in each.top)
            self._chosen.extend(each.chosen)
            self._ends.append(len(self._top_ids))
            self._chosen_ends.append(len(self._chosen))

    @property
    def held_bytes(self) -> int:
        """Bytes that the columns take, room to grow included."""
        return sum(sys.getsizeof(getattr(self, name)) for name in self.__slots__)

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
        tops, chosen = _before(self._ends, count), _before(self._chosen_ends, count)
        for column in (self._ids, self._values, self._ends, self._chosen_ends):
            del column[count:]
        del self._top_ids[tops:], self._top_values[tops:], self._chosen[chosen:]

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
        first, end = _before(self._ends, at), self._ends[at]
        top = zip(self._top_ids[first:end], self._top_values[first:end], strict=True)
        chosen = self._chosen[_before(self._chosen_ends, at) : self._chosen_ends[at]]
        return TokenLogprob(self._ids[at], self._values[at], tuple(top), tuple(chosen))

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
        first, end = _before(self._ends, start), _before(self._ends, stop)
        named, last = _before(self._chosen_ends, start), _before(self._chosen_ends, stop)
        part = TokenLogprobs()
        part._ids, part._values = self._ids[start:stop], self._values[start:stop]
        part._top_ids, part._top_values = self._top_ids[first:end], self._top_values[first:end]
        part._chosen = self._chosen[named:last]
        part._ends = array("i", (each - first for each in self._ends[start:stop]))
        part._chosen_ends = array("i", (each - named for each in self._chosen_ends[start:stop]))
        return part


def _before(ends: array[int], count: int) -> int:
    """How many of a column the first `count` entries have."""
    return ends[count - 1] if count else 0
