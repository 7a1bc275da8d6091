"""The prefix cache for one front end: the front end asks for changes, and gets all changes since it asked last.

Between two questions changes wait in the engine's own watch, which is bounded. So no step sends anything, and a front
end that asks too seldom loses its watch with SlowConsumer, as any slow reader does.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from core.engine.api import PrefixWatch
from core.types.arrays import Ints
from core.types.prefixes import PrefixChange, PrefixRemoved, PrefixStored

PIECE_PAGES = 4096
"""Pages of a watch's contents in one reply: 1.3 MiB with pages of 64 tokens, some milliseconds of the engine's loop."""


class PrefixWatches:
    """The open watches of one front end, by the numbers of the calls that opened them."""

    def __init__(self) -> None:
        self._watches: dict[int, PrefixWatch] = {}

    def open(self, number: int, watch: PrefixWatch) -> dict[str, int]:
        """Keep `watch` until `close(number)`. Returns its page size and the number of records in its contents."""
        self._watches[number] = watch
        return {"page_size": watch.page_size, "stored": len(watch.contents)}

    def contents(self, number: int, start: int) -> list[Any]:
        """The watch's contents from record `start` on: one record, or several of at most PIECE_PAGES pages together."""
        told: list[PrefixStored] = []
        pages = 0
        for stored in self._watches[number].contents[start:]:
            pages += len(stored.pages)
            if told and pages > PIECE_PAGES:
                break
            told.append(stored)
        return changes_to_plain(told)

    async def changes(self, number: int) -> list[Any]:
        """Wait for changes since the last call, as JSON values. Raises SlowConsumer if too many were left unread."""
        return changes_to_plain(await self._watches[number].changes())

    def close(self, number: int) -> None:
        """Close watch `number`. No-op if there is none."""
        watch = self._watches.pop(number, None)
        if watch is not None:
            watch.close()

    def __iter__(self) -> Iterator[int]:
        return iter(self._watches)


def changes_to_plain(changes: Sequence[PrefixChange]) -> list[Any]:
    """JSON values: [removed pages], or [parent, ids, stored pages]. Numbers are base64 of int32, little endian."""
    return [
        [each.parent, _text(each.ids), _text(each.pages)] if isinstance(each, PrefixStored) else [_text(each.pages)]
        for each in changes
    ]


def changes_from_plain(plain: Sequence[Any]) -> list[PrefixChange]:
    """The changes of `changes_to_plain`."""
    return [
        PrefixStored(each[0], _numbers(each[1]), _numbers(each[2]))
        if len(each) > 1
        else PrefixRemoved(_numbers(each[0]))
        for each in plain
    ]


def _text(numbers: Ints) -> str:
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()


def _numbers(text: str) -> Ints:
    return np.frombuffer(base64.b64decode(text), "<i4").astype(np.int64)
