"""The prefix cache for one front end: it asks for what changed, and gets all that did since it asked last.

A change that nobody asked for waits in the engine's own watch, which is bounded; so no step sends anything, and a front
end that does not keep up loses its watch as any slow reader does.
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
"""Pages of a state that are told at once: 1.3 MiB with pages of 64 tokens, some milliseconds of the engine's loop."""


class PrefixWatches:
    """What the engine's process keeps of one front end's watches, by the numbers of the calls that began them."""

    def __init__(self) -> None:
        self._watches: dict[int, PrefixWatch] = {}

    def open(self, number: int, watch: PrefixWatch) -> dict[str, int]:
        """Keep `watch` until `close(number)`; what the front end has to know of it."""
        self._watches[number] = watch
        return {"page_size": watch.page_size, "stored": len(watch.contents)}

    def contents(self, number: int, start: int) -> list[Any]:
        """The state from its `start`th record on: at least one, and no more than fit a piece."""
        told: list[PrefixStored] = []
        pages = 0
        for stored in self._watches[number].contents[start:]:
            pages += len(stored.pages)
            if told and pages > PIECE_PAGES:
                break
            told.append(stored)
        return changes_to_plain(told)

    async def changes(self, number: int) -> list[Any]:
        """See `PrefixWatch.changes`."""
        return changes_to_plain(await self._watches[number].changes())

    def close(self, number: int) -> None:
        """Nobody wants to know any more; what is no watch, or no longer, is none of this."""
        watch = self._watches.pop(number, None)
        if watch is not None:
            watch.close()

    def __iter__(self) -> Iterator[int]:
        return iter(self._watches)


def changes_to_plain(changes: Sequence[PrefixChange]) -> list[Any]:
    """JSON values: [removed pages], or [parent, ids, stored pages]; numbers as base64 of int32."""
    return [
        [each.parent, _text(each.ids), _text(each.pages)] if isinstance(each, PrefixStored) else [_text(each.pages)]
        for each in changes
    ]


def changes_from_plain(plain: Sequence[Any]) -> list[PrefixChange]:
    """And back."""
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
