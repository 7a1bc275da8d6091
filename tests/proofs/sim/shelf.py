"""What the prefix cache holds, by books of the harness' own: which page holds which prefix of which tenant.

Of the cache only its pages are asked. What stands in them follows from the rows that had them, and from the reference,
which knows all tokens of a request before they are out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tests.proofs.sim.clients import Client
from tests.proofs.sim.family import View
from tests.proofs.sim.structures import tree


class Shelf:
    """Prefixes by page. A page is noted with the row that has it; what it held before is then forgotten."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._size = view.scenario.page_size
        self._held: dict[int, int] = {}
        """Page -> hash of the prefix that it ends."""
        self._noted: dict[tuple[int, int], int] = {}
        """By row and number of its stay: how many of its pages are noted."""
        self._prefixes: dict[Client, list[int]] = {}

    def note(self) -> None:
        """Take down the pages that rows have now."""
        memory = self._view.memory
        for client in self._view.seated():
            row, owner = client.req.row, (client.req.row, client.req.generation)
            done, count = self._noted.get(owner, 0), int(memory._count[row])
            if count > done:
                prefixes = self._prefixes_of(client)
                for place, page in enumerate(memory._pages[row, done:count].tolist(), done):
                    # The last page of a sequence is part of nothing until it is full.
                    self._held[page] = prefixes[place] if place < len(prefixes) else 0
                self._noted[owner] = count

    def cached(self) -> set[int]:
        """Prefixes that the cache has now."""
        pages = np.flatnonzero(tree(self._view.memory.cache)._owned).tolist()
        return {self._held[page] for page in pages}

    def match(self, client: Client, cached: Iterable[int]) -> int:
        """How many tokens of a waiting request the cache has; one token is always left to compute."""
        held = set(cached)
        known = client.req.prompt_len + len(client.req.outputs)
        found = 0
        for prefix in self._prefixes_of(client)[: (known - 1) // self._size]:
            if prefix not in held:
                break
            found += self._size
        return found

    def _prefixes_of(self, client: Client) -> list[int]:
        """A hash for each whole page of all that the request will ever be: of its tenant and all tokens up to there."""
        found = self._prefixes.get(client)
        if found is None:
            group = client.siblings[0].number if self._view.scenario.cache == "none" else 0
            state = hash((client.salt, client.adapter, group))
            tokens = [*client.req.prompt.tolist(), *client.answer.tokens]
            found = self._prefixes[client] = []
            for start in range(0, len(tokens) - self._size + 1, self._size):
                state = hash((state, *tokens[start : start + self._size]))
                found.append(state)
        return found
