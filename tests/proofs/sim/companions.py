"""What the simulation needs of each kind of companion pool: one `CompanionSide`, in a file of its own.

A side brings the production host side, its device side in plain integers (or the production one), and what must hold of
both. The fake model reads all pools: each says what it holds of a row's tokens, and the next token follows from what
they say together, so whatever is wrong in one of them shows in the stream as well, where the reference sees it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from core.batch.schedule_batch import ScheduleBatch
from core.memory.companion import Companion
from core.memory.request_memory import RequestMemory
from core.scheduler.running import RunningSet
from core.types.request import Req
from tests.proofs.sim.kv_memory import KVMemory, Table
from tests.proofs.sim.plain import Plain

Owner = tuple[int, int]
"""Row and generation."""


class CompanionSide(ABC):
    """One companion of one world. The host's moments come first, the device's, which may be much later, follow."""

    host: Companion
    lens: Sequence[int] = ()

    @property
    def name(self) -> str:
        """Key of its writes."""
        return self.host.name

    @abstractmethod
    def check(self, memory: RequestMemory, running: RunningSet, seats: Sequence[Req]) -> None:
        """After a step of the scheduler, whatever happened in it; `seats` are those who run."""

    @abstractmethod
    def leave(self, batch: ScheduleBatch, flying: Sequence[Any]) -> Any:
        """At the submission of `batch`: what the device must know of this moment, which travels with the batch. The
        device uses it to poison what was freed and to look at what is kept, never to compute.

        `flying`: what was left with the batches that the device has not executed.
        """

    @abstractmethod
    def told(self, batch: ScheduleBatch) -> str:
        """What the batch brings, for the story; empty when there is nothing to tell."""

    @abstractmethod
    def take_back(self, owners: Sequence[Owner], left: Any) -> None:
        """Before the device executes the batch: `owners` gave their rows back since the batch before."""

    @abstractmethod
    def check_writes(self, plain: Plain, writes: Any) -> None:
        """The contract between host and device, whatever the device makes of it."""

    @abstractmethod
    def begin(self, writes: Any) -> None:
        """Apply `writes`, None when there are none, as the production companion does first thing in a step."""

    def roots(self, plain: Plain) -> list[int] | None:
        """What the first token of each row follows, after `begin`; None for what it follows without this side."""
        return None

    @abstractmethod
    def run(self, plain: Plain, ids: list[int], tables: list[Table], kv: KVMemory) -> list[int]:
        """Read and write for all rows of the step, whose KV is written by now; what this pool then says of each row.

        What is right must be what the KV slot of the row's last token holds, the hash of all tokens up to it; or what
        the reference says, where a pool holds something else.
        """

    def judged(self, counts: list[int]) -> None:
        """Of each row of a step that verified drafts, so many tokens count; for devices that no step tells of it."""
        assert min(counts) >= 1, counts

    def stand(self, lens: Sequence[int]) -> None:
        """`lens`, by row: tokens of the owner that the device has, kept current by the device."""
        self.lens = lens

    @abstractmethod
    def look_back(self, kv: KVMemory, left: Any) -> None:
        """After the step: the device holds what the host thought that it would when it submitted this."""
