"""Changes of a prefix cache's pages, for observers: plain data, one record per change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class PrefixStored:
    """Pages that joined the cache: `pages[i]` holds tokens [i * page_size, (i + 1) * page_size) of `ids`.

    `pages` is int64[n] and `ids` int64[n * page_size]; neither changes any more. A page number stands for these tokens
    until a `PrefixRemoved` names it.
    """

    parent: int
    """The page before the first of these; 0 where they begin a prompt."""
    ids: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixRemoved:
    """Pages, int64[n], that the cache gave up; some may be of a namespace that the reader does not follow."""

    pages: npt.NDArray[np.int64]


PrefixChange = PrefixStored | PrefixRemoved
