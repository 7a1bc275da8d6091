"""What host memory keeps of keys and values that the device has given up: of retracted requests, and of prefixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.disagg.interface import Giver
from core.executor.interface import HostCopies
from core.memory.host_prefixes import HostMemory
from core.memory.request_memory import RequestMemory
from core.scheduler.handing_over import HandingOver, portable
from core.scheduler.outgoing import Outgoing
from core.scheduler.prefix_copies import PrefixCopies
from core.scheduler.rejoining import Rejoining
from core.scheduler.taking_over import TakingOver


@dataclass(frozen=True, slots=True)
class HostCacheStats:
    """What `EngineStats` tells of host memory: bytes held, requests, and tokens of prefixes."""

    nbytes: int = 0
    rejoined: int = 0
    dropped: int = 0
    fetched_tokens: int = 0
    kept_tokens: int = 0
    evicted_tokens: int = 0


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
        if host.prefixes is not None:
            self.prefixes = PrefixCopies(host.prefixes, memory, self.outgoing, portable(memory, host.tier))

        self.handing = None
        """None where no other engine decodes what is computed here."""
        if giver is not None:
            self.handing = HandingOver(host.tier, self.outgoing, giver, memory, wake)
        self.taking = None
        """None where no other engine computes what is decoded here, and retracted requests leave nothing there."""
        if takes or host.leaves:
            self.taking = TakingOver(host.tier, self.outgoing, memory, leaves=host.leaves)

    def settle(self) -> bool:
        """Take note of what has come, and of what other engines have got; whether anything did."""
        landed = self.outgoing.land()
        return (self.handing is not None and self.handing.settle()) or landed

    def stats(self) -> HostCacheStats:
        """The figures of now."""
        of_prefixes = self.prefixes
        return HostCacheStats(
            self._tier.used_bytes,
            *_returned(self.rejoining, self.taking),
            *((0, 0, 0) if of_prefixes is None else (of_prefixes.fetched, of_prefixes.kept, of_prefixes.evicted)),
        )


def _returned(*rooms: Rejoining | TakingOver | None) -> tuple[int, int]:
    """Requests that went on from what they had left, and those that could not."""
    found = [(room.rejoined, room.dropped) for room in rooms if room is not None]
    return sum(went for went, _ in found), sum(dropped for _, dropped in found)
