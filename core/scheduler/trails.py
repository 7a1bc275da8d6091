"""What rows hold beside the keys of a prompt's last tokens is copied while the prompt is computed: it is gone later.

A window's pages go to other rows as soon as no later step of their row reads them. So a prompt whose keys are in host
memory could be gone on from where it ended, and nowhere within: another question about the same document was computed
from its first token on. Where a prompt may be gone on from within, each of these copies belongs to a whole chunk there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core.batch.schedule_batch import ScheduleBatch
from core.memory.companion import Trailing
from core.memory.host_moves import CopyBack, HostCopy
from core.memory.host_prefixes import HeldPrefix, HostPrefixes
from core.memory.host_tier import HostTier
from core.memory.request_memory import RequestMemory
from core.memory.usable_prefix import Usable
from core.scheduler.outgoing import NO_SLOTS, Outgoing
from core.types.arrays import Ints

LAST = 2048
"""Tokens at the end of a prompt within which it may be gone on from: questions behind a document are mostly shorter."""
SHARE = 4
"""Of host memory at most this part is held by prompts that are being computed."""


@dataclass(slots=True)
class _Prompt:
    ids: Ints
    salt: str
    due: deque[int]
    """Chunks whose ends are to come, ascending."""
    copies: dict[int, HostCopy] = field(default_factory=dict)
    """By chunk, ascending. Nothing finds them before the prompt has led to a token."""


class Trails:
    """Which prompts are being computed, and what was copied of them so far. Loop thread only."""

    def __init__(
        self, pool: Trailing, tier: HostTier, prefixes: HostPrefixes, memory: RequestMemory, outgoing: Outgoing
    ) -> None:
        """`pool`: the only one that rows hold something of beside their keys."""
        self._pool = pool
        self._tier = tier
        self._prefixes = prefixes
        self._memory = memory
        self._outgoing = outgoing
        in_chunk = prefixes.chunk // memory.page_size
        self._pages = min(in_chunk, pool.trail)
        """The last ones of each chunk: what is copied of it."""
        self.reach = -(-pool.trail // in_chunk)
        """Chunks whose copies it takes to go on behind the last of them."""
        self.beside = (self._pages * memory.page_size,)
        """Slots of the pool that a copy has."""
        self._most = tier.num_blocks // SHARE // tier.blocks_for(0, self.beside)
        self._held = 0
        """Copies of all prompts that are being computed."""
        self._prompts: dict[int, _Prompt] = {}
        """By row."""

    def seated(self, row: int, ids: Ints, salt: str, start: int) -> None:
        """`row` is going to compute `ids`, int64[n], from token `start` on.

        Due are the ends of chunks from which others may go on: the last ones, and those before the place where the
        prompt leaves what is held, as a system's prompt with another document behind it does.
        """
        chunk = self._prefixes.chunk
        shared, lacking = self._prefixes.without_trail(ids, salt)
        last = (len(ids) - LAST) // chunk - self.reach

        def is_due(number: int) -> bool:
            return (number + 1) * chunk > start and (number >= last or shared - self.reach <= number < shared)

        self._prompts[row] = _Prompt(ids, salt, deque(filter(is_due, lacking)))

    def submitted(self, batch: ScheduleBatch) -> None:
        """`batch` was submitted: copy what it leaves at the ends of chunks, before the next one is planned."""
        ends = batch.seq_lens[: batch.num_extend].tolist()
        for row, end in zip(batch.rows[: batch.num_extend].tolist(), ends, strict=True):
            prompt = self._prompts.get(row)
            while prompt is not None and prompt.due and (prompt.due[0] + 1) * self._prefixes.chunk <= end:
                self._copy(row, prompt, prompt.due.popleft())

    def _copy(self, row: int, prompt: _Prompt, number: int) -> None:
        pages = self._memory.pages_of(row, (number + 1) * self._prefixes.chunk)
        slots = self._pool.slots_of(pages[len(pages) - self._pages :])
        if slots is None:
            return
        if self._held >= self._most and prompt.copies:
            # Where there is room for a few, those further on are worth more.
            self._release([prompt.copies.pop(next(iter(prompt.copies)))])
        if self._held >= self._most or (copy := self._prefixes.reserve_beside(0, self.beside)) is None:
            return
        self._held += 1
        prompt.copies[number] = copy
        self._outgoing.begin_beside(copy, (slots,))

    def reached(self, row: int) -> int:
        """Tokens up to the end of the last chunk of the prompt in `row` that was copied; 0 without any."""
        prompt = self._prompts.get(row)
        return (max(prompt.copies) + 1) * self._prefixes.chunk if prompt is not None and prompt.copies else 0

    def publish(self, row: int, tokens: int, kept: Callable[[Ints, HostCopy], None]) -> None:
        """The prompt in `row` was computed, and is held up to token `tokens` at least: others may go on within that.

        `kept`: told of each copy, and of the ids, int64[n], behind which it is.
        """
        if (prompt := self._prompts.pop(row, None)) is None:
            return
        for number, copy in prompt.copies.items():
            if (end := (number + 1) * self._prefixes.chunk) <= tokens:
                self._held -= 1
                if self._prefixes.publish_trail(prompt.ids[:end], prompt.salt, copy):
                    kept(prompt.ids[:end], copy)
            else:
                self._release([copy])

    def gone(self, row: int) -> None:
        """The owner of `row` gives it back: what nothing finds yet is of no use."""
        if (prompt := self._prompts.pop(row, None)) is not None:
            self._release(prompt.copies.values())

    def _release(self, copies: Iterable[HostCopy]) -> None:
        for copy in copies:
            self._held -= 1
            self._tier.free(copy)

    def find(self, ids: Ints, usable: Usable, salt: str) -> HeldPrefix | None:
        """See `HostPrefixes.find_trail`."""
        return self._prefixes.find_trail(ids, usable, salt, self.reach)

    def backs(self, held: HeldPrefix, slots: Ints) -> list[CopyBack]:
        """What fills `slots`, int64[n], of the pool: those that a row behind `held` needs, in their order."""
        found, end = list[CopyBack](), len(slots)
        for copy in reversed(held.trails):
            begin = max(0, end - copy.beside[0])
            found.append(CopyBack((copy,), 0, NO_SLOTS, beside=(slots[begin:end],)))
            end = begin
        return found
