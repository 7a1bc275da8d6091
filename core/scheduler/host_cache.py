"""What host memory keeps of keys and values that the device has given up: of retracted requests, and of prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.batch.schedule_batch import ScheduleBatch
from core.disagg.interface import Giver
from core.disk.chunk_store import ChunkStore
from core.executor.interface import HostCopies
from core.memory.companion import Portable, Trailing
from core.memory.host_prefixes import HostMemory
from core.memory.request_memory import RequestMemory
from core.scheduler.disk_prefixes import DiskPrefixes
from core.scheduler.file_names import Lasting
from core.scheduler.handing_over import HandingOver, portable
from core.scheduler.outgoing import Outgoing
from core.scheduler.prefix_copies import PrefixCopies
from core.scheduler.rejoining import Rejoining
from core.scheduler.taking_over import TakingOver
from core.scheduler.trails import Trails


@dataclass(frozen=True, slots=True)
class HostCacheStats:
    """What `EngineStats` tells of host memory: bytes held, requests, and tokens of prefixes."""

    nbytes: int = 0
    rejoined: int = 0
    dropped: int = 0
    fetched_tokens: int = 0
    kept_tokens: int = 0
    evicted_tokens: int = 0
    disk: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EngineStats`."""


class HostCache:
    """The rooms that share one host memory. Loop thread only."""

    def __init__(
        self,
        host: HostMemory,
        memory: RequestMemory,
        copies: HostCopies,
        giver: Giver | None = None,
        wake: Callable[[], None] = lambda: None,
        *,
        takes: bool = False,
    ) -> None:
        """`giver`: what gives keys to engines that decode; None for one that does not. It calls `wake`.

        `takes`: whether prompts of others are decoded.
        """
        self._tier = host.tier
        self.outgoing = Outgoing(host.tier, memory, copies)
        self.rejoining = Rejoining(host.tier, self.outgoing) if host.rejoins else None
        """None where retracted requests are computed again."""
        self.prefixes = None
        """None where no prefixes are kept."""
        self.disk: DiskPrefixes | None = None
        """None where no files are kept."""
        self._host, self._others = host, portable(memory, host.tier)
        self._page_size = memory.page_size
        if host.prefixes is not None:
            trails = _trails(self._others, host, memory, self.outgoing)
            self.prefixes = PrefixCopies(host.prefixes, memory, self.outgoing, self._others, trails)

        self.handing = None
        """None where no other engine decodes what is computed here."""
        if giver is not None:
            self.handing = HandingOver(host.tier, self.outgoing, giver, memory, wake)
        self.taking = None
        """None where no other engine computes what is decoded here, and retracted requests leave nothing there."""
        if takes or host.leaves:
            self.taking = TakingOver(host.tier, self.outgoing, memory, leaves=host.leaves)

    @property
    def is_copying(self) -> bool:
        """Whether threads read or write what is kept here."""
        return self.disk is not None and not self.disk.is_idle

    def write_to(self, store: ChunkStore, lasting: Lasting, wake: Callable[[], None]) -> DiskPrefixes | None:
        """Keep prefixes in `store` too; None, and nothing is kept there, where host memory keeps none."""
        if self.prefixes is None or self._host.prefixes is None:
            return None
        pools = self._others, self._page_size, self.prefixes.trails
        self.disk = self.prefixes.disk = DiskPrefixes(store, self._host.prefixes, self.outgoing, lasting, wake, pools)
        return self.disk

    def submitted(self, batch: ScheduleBatch) -> None:
        """`batch` was submitted just now, and none is planned behind it."""
        if self.prefixes is not None and self.prefixes.trails is not None:
            self.prefixes.trails.submitted(batch)

    def settle(self) -> bool:
        """Take note of what has come, and of what other engines have got; whether anything did."""
        landed = self.outgoing.land()
        written = self.disk is not None and self.disk.settle()
        return (self.handing is not None and self.handing.settle()) or landed or written

    def stats(self) -> HostCacheStats:
        """The figures of now."""
        of_prefixes = self.prefixes
        return HostCacheStats(
            self._tier.used_bytes,
            *_returned(self.rejoining, self.taking),
            *((0, 0, 0) if of_prefixes is None else (of_prefixes.fetched, of_prefixes.kept, of_prefixes.evicted)),
            {} if self.disk is None else self.disk.stats(),
        )


def _trails(others: Sequence[Portable], host: HostMemory, memory: RequestMemory, outgoing: Outgoing) -> Trails | None:
    """None where rows hold what is of one place, as a recurrent state is, or nothing beside keys."""
    match others:
        case [Trailing() as pool] if host.prefixes is not None and pool.trail:
            return Trails(pool, host.tier, host.prefixes, memory, outgoing)
        case _:
            return None


def _returned(*rooms: Rejoining | TakingOver | None) -> tuple[int, int]:
    """Requests that went on from what they had left, and those that could not."""
    found = [(room.rejoined, room.dropped) for room in rooms if room is not None]
    return sum(went for went, _ in found), sum(dropped for _, dropped in found)
