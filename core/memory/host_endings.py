"""Where prefixes in host memory can be gone on from, of models whose rows hold more than keys. Host state only.

A recurrent state is of one place, and a window's pages are of the tokens before it. So beside its keys a prefix needs
what was there where it ends, which is the end of any page; the keys behind its last whole chunk go along with that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from core.memory.host_moves import HostCopy
from core.memory.host_tier import HostTier
from core.memory.usable_prefix import Usable
from core.prefix.base import Ids
from core.prefix.node import PrefixNode

Place = tuple[str, int]
"""Namespace, and page of the index with the last whole chunk before the end; 0 where there is none."""


@dataclass(eq=False, slots=True)
class HostEnding:
    """What was where a prefix ends: `copy` has its last tokens, of which the ids are `tail`, and slots of the pools."""

    copy: HostCopy
    place: Place
    tail: bytes
    node: PrefixNode | None
    """Locked in the index as long as this is kept."""
    users: int = 0
    """Rows that wait for it."""


class HostEndings:
    """Endings by place and tail. Those that were not used for longest give way."""

    def __init__(self, tier: HostTier, chunk: int) -> None:
        """`chunk`: tokens of a chunk; a tail has 1 to `chunk` tokens."""
        self._tier = tier
        self._chunk = chunk
        self._found: dict[Place, dict[int, dict[bytes, HostEnding]]] = {}
        """By place, bytes of the tail, and tail: many prompts may end at one place, in few lengths."""
        self._recent: OrderedDict[HostEnding, None] = OrderedDict()
        """The least recently used first."""

    def __iter__(self) -> Iterator[HostEnding]:
        """All, the least recently used first; of a copy, so that they may be dropped meanwhile."""
        return iter(list(self._recent))

    def find(self, ids: Ids, pages: Sequence[int], salt: str, usable: Usable) -> HostEnding | None:
        """The last one in `ids`, int64[n], whose whole chunks are `pages`; None without any. Changes nothing.

        `usable`: see `usable_prefix`; it has to allow the very end.
        """
        for count in range(len(pages), -1, -1):
            begin = count * self._chunk
            here = self._found.get((salt, pages[count - 1] if count else 0), {})
            for size in sorted(here, reverse=True):
                end = begin + size // ids.itemsize
                if usable(end) == end and (found := here[size].get(ids[begin:end].tobytes())):
                    return found
        return None

    def at(self, place: Place, tail: bytes) -> HostEnding | None:
        """The one at `place` behind `tail`."""
        return self._found.get(place, {}).get(len(tail), {}).get(tail)

    def end_of(self, ending: HostEnding, pages: Sequence[int]) -> int:
        """Tokens up to the end of `ending`, behind chunks that are the first of `pages`."""
        _, page = ending.place
        return (pages.index(page) + 1 if page else 0) * self._chunk + ending.copy.tokens

    def used(self, ending: HostEnding) -> None:
        """It is the most recently used one now."""
        self._recent.move_to_end(ending)

    def add(self, ending: HostEnding) -> None:
        """Keep it from now on."""
        self._found.setdefault(ending.place, {}).setdefault(len(ending.tail), {})[ending.tail] = ending
        self._recent[ending] = None

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def kept(self) -> int:
        """As many as `len`, counted by place."""
        return sum(len(each) for here in self._found.values() for each in here.values())

    def drop(self, ending: HostEnding) -> int:
        """Keep it no longer; returns how many blocks that frees. The caller unlocks its node."""
        assert not ending.users, "a row waits for it"
        del self._recent[ending]
        here, size = self._found[ending.place], len(ending.tail)
        del here[size][ending.tail]
        if not here[size]:
            del here[size]
        if not here:
            del self._found[ending.place]
        self._tier.free(ending.copy)
        return len(ending.copy.blocks)


def tail_of(ids: Ids, begin: int) -> bytes:
    """What a tail is kept by: `ids`, int64[n], from `begin` on."""
    return np.ascontiguousarray(ids[begin:]).tobytes()
