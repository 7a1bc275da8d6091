"""What one family of oracles is, and what all of them look at. Each has a file, and a line in `oracles.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from core.batch.schedule_batch import ScheduleBatch
from core.memory.request_memory import RequestMemory
from core.scheduler.scheduler import Scheduler
from tests.proofs.sim.clients import Client, Clients
from tests.proofs.sim.device import SimExecutor
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits


@dataclass(slots=True)
class View:
    """One engine of a world, its clients, and the world's clock."""

    scenario: Scenario
    scheduler: Scheduler
    device: SimExecutor
    clients: Clients
    hits: Hits
    now: float = 0.0
    """Seconds on the clock of the step that runs, or that ran last."""

    @property
    def memory(self) -> RequestMemory:
        """Rows, pages and cached prefixes."""
        return self.scheduler.memory

    def seated(self) -> Iterator[Client]:
        """Clients of the requests that run now, in the order of their rows; also in the middle of a step."""
        for req in self.scheduler.running.reqs:
            if req is not None:
                yield req.sink


class Family:
    """Looks at a world in these moments, and raises `Violation`. What a family does not need it leaves out."""

    def __init__(self, view: View) -> None:
        self.view = view

    def before_step(self) -> None:
        """The scheduler is about to step; the input of the step is queued."""

    def planned(self, batch: ScheduleBatch | None) -> None:
        """The planner answered; `batch` is not submitted yet."""

    def after_step(self) -> None:
        """The scheduler has stepped, and nothing raised."""

    def when_empty(self) -> None:
        """Every request has ended, and every result was taken."""
