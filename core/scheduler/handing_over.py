"""Prompts that are computed here and decoded by another engine: their keys are kept until that one has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from core.disagg.interface import Giver, Offer
from core.memory.companion import Portable
from core.memory.host_moves import HostCopy
from core.memory.host_tier import HostTier
from core.memory.request_memory import RequestMemory
from core.scheduler.outgoing import Outgoing
from core.types.arrays import Ints
from core.types.request import Req


class HandingOver:
    """Which copies in host memory are offered to other engines.

    A request ends as any other, and its row and pages go back at once. What is kept is a copy, which the giver lets go
    when it was delivered, or nothing asked for it in time (vLLM #41383 kept the request itself).
    """

    def __init__(
        self, tier: HostTier, outgoing: Outgoing, giver: Giver, memory: RequestMemory, wake: Callable[[], None]
    ) -> None:
        """`wake`: has the scheduler step soon; called from any thread."""
        self._tier = tier
        self._outgoing = outgoing
        self._giver = giver
        self._memory = memory
        self._wake = wake
        self._copies: dict[int, HostCopy] = {}
        """By number: copies that are under way, or offered."""
        self._over: deque[tuple[int, bool]] = deque()
        """(number of a copy, whether it was delivered) since the last call of `settle`. Filled from any thread."""
        self.given = self.lost = self.given_tokens = 0
        """Prompts that other engines got; prompts that none got, for want of room or because none asked; tokens."""

    def __len__(self) -> int:
        """Copies that are kept."""
        return len(self._copies)

    def keep(self, req: Req, row: int) -> None:
        """`req`, all of whose prompt is computed in `row`, is about to give that back: copy its whole pages.

        The last token of the prompt is not among them: the engine that decodes computes it, and samples.
        """
        assert req.kept is not None
        tokens = whole_pages(req.prompt_len, self._memory.page_size)
        taken = self._take(row, tokens) if tokens else None
        if taken is None:
            self.lost += tokens > 0
            self._giver.withdraw(req.kept.room)
            return
        copy, beside = taken
        self._copies[copy.number] = copy
        self._outgoing.begin((copy,), row, 0, partial(self._landed, req, copy), beside)

    def refuse(self, req: Req) -> None:
        """`req` has ended without a prompt that was computed."""
        assert req.kept is not None
        self._giver.withdraw(req.kept.room)

    def settle(self) -> bool:
        """Free copies that were delivered, or are not wanted; whether there were any."""
        settled = bool(self._over)
        while self._over:
            number, delivered = self._over.popleft()
            copy = self._copies.pop(number)
            self._tier.free(copy)
            self.given += delivered
            self.lost += not delivered
            self.given_tokens += copy.tokens * delivered
        return settled

    def forget(self) -> None:
        """Nothing of what is offered now is given to any engine from now on. No copy is under way."""
        self._giver.retire()

    def _take(self, row: int, tokens: int) -> tuple[HostCopy, tuple[Ints, ...]] | None:
        """Room for a copy of the first tokens of `row`, and what of other pools it has; None where it cannot be."""
        pages, beside = self._memory.pages_of(row, tokens), list[Ints]()
        for pool in portable(self._memory, self._tier):
            if (slots := pool.leaves(pages)) is None:
                return None
            beside.append(slots)
        copy = self._tier.take(tokens, tuple(map(len, beside)))
        return None if copy is None else (copy, tuple(beside))

    def _landed(self, req: Req, copy: HostCopy) -> None:
        assert req.kept is not None
        views = partial(self._outgoing.views, copy)
        offer = Offer(req.kept.room, req.kept.claim, copy.tokens, min(req.cached_tokens, copy.tokens), views)
        self._giver.offer(offer, partial(self._is_over, copy.number))

    def _is_over(self, number: int, delivered: bool) -> None:
        self._over.append((number, delivered))
        self._wake()


def portable(memory: RequestMemory, tier: HostTier) -> list[Portable]:
    """The pools of which something goes along, in the order in which copies have them."""
    found = {pool.name: pool for pool in memory.companions if isinstance(pool, Portable)}
    return [found[name] for name in tier.beside]


def whole_pages(prompt_len: int, page_size: int) -> int:
    """Tokens of a prompt that are handed over: whole pages, and not its last token."""
    return (prompt_len - 1) // page_size * page_size
