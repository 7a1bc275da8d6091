"""Which KV pages finite logits have been computed from: their numbers may be read, and copied, without a doubt."""

from __future__ import annotations

import numpy as np

from core.types.arrays import Ints


class SoundPages:
    """A mark for each page, from the first finite logits that depend on all of it until the page is freed."""

    def __init__(self, num_pages: int, page_size: int, reach: int) -> None:
        """`reach`: how many of the newest tokens a logit depends on."""
        self._page_size = page_size
        self._reach = reach
        self._sound = np.zeros(num_pages + 1, np.bool_)

    def vouch(self, pages: Ints, tokens: int) -> None:
        """The first `tokens` in `pages` led to finite logits, so no key within their reach is NaN: mark whole pages."""
        first = -(-max(0, tokens - self._reach) // self._page_size)
        self._sound[pages[first : tokens // self._page_size]] = True

    def trust(self, pages: Ints) -> None:
        """`pages` are going to hold copies of what was in sound ones."""
        self._sound[pages] = True

    def leading(self, pages: Ints) -> int:
        """How many of `pages` are sound, up to the first that is not."""
        sound = self._sound[pages]
        return len(pages) if sound.all() else int(sound.argmin())

    def forget(self, pages: Ints) -> None:
        """`pages` were freed."""
        self._sound[pages] = False
