"""Which tokens followed the same tokens before: texts of all requests, found by their last few tokens.

Memory is fixed: a store of tokens in blocks, of which the oldest is taken again, and a table from the hash of some
consecutive tokens to the place of the last of them, where a newer entry replaces an older one. An entry may therefore
lead to a block that has another text by now. That is a wrong guess and nothing else, since each block knows the scope
of its text and is read for no other. Drafting from what was said before is prompt lookup (Saxena 2023) and
SuffixDecoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from core.types.arrays import Ints

ORDERS: Final = (2, 4, 8)
"""How many last tokens must be the same, rising; the most telling is looked for first."""
LONGEST: Final = ORDERS[-1]
BLOCK: Final = 64
"""Tokens of a block."""
NOWHERE: Final = -1
_WORD: Final = 2**64 - 1
_FACTOR: Final = 0x9E3779B97F4A7C15
_POWERS: Final = tuple(pow(_FACTOR, i + 1, 2**64) for i in range(LONGEST))


@dataclass(slots=True)
class Text:
    """One sequence that is being written. Each instance is for one index."""

    scope: int
    tail: tuple[int, ...] = ()
    """Its last tokens, at most as many as the longest order looks at."""
    place: int = NOWHERE
    """Of its last token in the store."""
    taking: int = 0
    """Which taking of that block was its own."""
    keys: tuple[int, ...] = ()
    """Hashes of what it ends with, by order. They enter the table with the next token: before, nothing follows."""


class Found(NamedTuple):
    """What followed before."""

    order: int
    """Index into `ORDERS`: by how many tokens it was found."""
    ids: list[int]


NOTHING: Final = Found(0, [])


class SuffixIndex:
    """Texts of several scopes, in about `bytes_limit` bytes. Used by one thread."""

    def __init__(self, bytes_limit: int) -> None:
        # A token takes 4 bytes in the store, and 16 in the table for each order.
        blocks = max(2, bytes_limit // (BLOCK * (4 + 16 * len(ORDERS))))
        size = 1 << (blocks * BLOCK * len(ORDERS)).bit_length() - 1
        self._blocks, self._mask = blocks, size - 1
        self._tokens = array("i", [NOWHERE]) * (blocks * BLOCK)
        self._scopes = array("q", [0]) * blocks
        self._next = array("q", [NOWHERE]) * blocks
        """By block: the one that goes on with its text."""
        self._keys, self._places = array("Q", [0]) * size, array("q", [NOWHERE]) * size
        self._takings = 0
        """Blocks that were taken so far, again or not."""
        self._taking = array("q", [0]) * blocks
        """By block: the number of the taking that it is from."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, whatever it holds."""
        columns = (self._tokens, self._scopes, self._next, self._taking, self._keys, self._places)
        return sum(column.itemsize * len(column) for column in columns)

    def append(self, text: Text, token: int) -> None:
        """`text` goes on with `token`."""
        self._enter(text)
        text.place = self._behind(text)
        self._tokens[text.place] = token
        text.tail = (*text.tail[1 - LONGEST :], token)
        text.keys = _hashes(text.scope, text.tail)

    def write(self, text: Text, ids: Ints) -> None:
        """`text` goes on with `ids`, int64[n]. As `append` of each; much faster for many."""
        if len(ids) == 0:
            return
        before, first = text.tail, [text.place] if text.tail else []
        places: Ints = np.concatenate([first, self._store(text, ids)]).astype(np.int64)
        known = np.concatenate([before, ids]).astype(np.uint64)
        self._enter_all(text.scope, known, places)
        text.tail = tuple(known[-LONGEST:].tolist())
        text.keys = _hashes(text.scope, text.tail)

    def _store(self, text: Text, ids: Ints) -> Ints:
        """int64[n]: the places that `ids` got behind `text`."""
        store, places, at = np.frombuffer(self._tokens, np.int32), list[Ints](), 0
        while at < len(ids):
            first = self._behind(text)
            part = ids[at : at + BLOCK - first % BLOCK]
            store[first : first + len(part)] = part
            places.append(np.arange(first, first + len(part)))
            text.place, at = first + len(part) - 1, at + len(part)
        return np.concatenate(places)

    def follow(self, text: Text, most: int) -> Found:
        """Up to `most` tokens that followed what `text` ends with, when that was last said; empty if it was not.

        Where these are its own last tokens, it repeats itself with their number as the period, and is taken to go on
        so: a text that says one word again and again is not guessed a word at a time.
        """
        for order in range(len(text.keys) - 1, -1, -1):
            key = text.keys[order]
            slot = key & self._mask
            if self._keys[slot] == key:
                found, last = self._read(self._places[slot], most, text.scope)
                if found:
                    return Found(order, _again(found, most) if last == text.place else found)
        return NOTHING

    def _read(self, place: int, most: int, scope: int) -> tuple[list[int], int]:
        """(up to `most` tokens behind `place`, through the blocks of its text; the place of the last of them)."""
        found, at, block, last = list[int](), place + 1, place // BLOCK, place
        while block != NOWHERE and self._scopes[block] == scope:
            run = self._tokens[at : min((block + 1) * BLOCK, at + most - len(found))]
            if NOWHERE in run:
                run = run[: run.index(NOWHERE)]
            if run:
                found += run
                last = at + len(run) - 1
            if len(found) == most or (last + 1) % BLOCK:
                break
            block = self._next[block]
            at = block * BLOCK
        return found, last

    def _behind(self, text: Text) -> int:
        """The place of the next token of `text`; begins a new block where its last one is full, or another's by now.

        What a text of another scope took while this one waited is not written to: it would be read as of that scope.
        """
        owns = text.place != NOWHERE and self._taking[text.place // BLOCK] == text.taking
        if owns and (text.place + 1) % BLOCK:
            return text.place + 1
        block = self._takings % self._blocks
        self._takings += 1
        self._taking[block] = text.taking = self._takings
        self._tokens[block * BLOCK : (block + 1) * BLOCK] = _EMPTY
        self._scopes[block], self._next[block] = text.scope, NOWHERE
        if owns:
            self._next[text.place // BLOCK] = block
        return block * BLOCK

    def _enter(self, text: Text) -> None:
        for key in text.keys:
            self._keys[key & self._mask] = key
            self._places[key & self._mask] = text.place

    def _enter_all(self, scope: int, ids: np.ndarray, places: Ints) -> None:
        """Enter what ends at each of `places`, int64[m], but the last one. `ids`, uint64[n >= m], ends at the last."""
        keys, where = np.frombuffer(self._keys, np.uint64), np.frombuffer(self._places, np.int64)
        hashes, begun = np.full(len(ids), scope & _WORD, np.uint64), len(ids) - len(places)
        for back, power in enumerate(_POWERS[: len(ids)]):
            hashes[back:] += ids[: len(ids) - back] * np.uint64(power)
            if back + 1 in ORDERS:
                start = max(back, begun)
                found = hashes[start:-1]
                slots = (found & np.uint64(self._mask)).astype(np.int64)
                keys[slots], where[slots] = found, places[start - begun : -1]


_EMPTY: Final = array("i", [NOWHERE]) * BLOCK


def _again(found: list[int], most: int) -> list[int]:
    """`found` again and again, `most` tokens of it."""
    return (found * (most // len(found) + 1))[:most]


def _hashes(scope: int, tail: tuple[int, ...]) -> tuple[int, ...]:
    """Of the last tokens of `tail`, for each order that it is long enough for. What two scopes say alike differs."""
    found, total = list[int](), scope
    for count, (token, power) in enumerate(zip(reversed(tail), _POWERS), start=1):
        total += token * power
        if count in ORDERS:
            found.append(total & _WORD)
    return tuple(found)
