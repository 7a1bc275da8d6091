"""Many seeds, one after another or on several cores, and what to do with those that fail."""

from __future__ import annotations

import gc
import multiprocessing
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from core.invariants import InvariantViolation
from tests.proofs.sim.ledger import LedgerViolation
from tests.proofs.sim.scenario import draw
from tests.proofs.sim.story import Hits, Story, Violation
from tests.proofs.sim.world import Outcome, World
from tests.tidy.source import ROOT

CORPUS = Path(__file__).with_name("corpus.txt")
FAILED = ROOT / "build" / "failed-seeds.txt"
BLOCK = 50
"""Seeds between two collections of garbage, and per message of a worker process."""


def play(seed: int, steps: int | None = None, *, hits: Hits | None = None, story: Story | None = None) -> Outcome:
    """Run one seed, for `steps` or as many as it draws; every exception becomes the outcome, named by who raised it."""
    story = story or Story()
    world: World | None = None
    try:
        scenario = draw(seed)
        world = World(scenario, story, hits or Hits())
        world.run(scenario.steps if steps is None else steps)
        oracle, text = "", ""
    except Violation as violation:
        oracle, text = violation.oracle, str(violation)
    except LedgerViolation as violation:
        oracle, text = f"ledger:{violation.entry.fault.value}", str(violation)
    except InvariantViolation as violation:
        oracle, text = f"invariant:{violation.name}", str(violation)
    except Exception as error:  # whatever the engine raises is a finding
        oracle, text = f"crash:{type(error).__name__}", traceback.format_exc()
    return Outcome(seed, world.ticks if world else 0, story.digest, oracle, text)


@dataclass(slots=True)
class Sweep:
    """What a range of seeds came to."""

    seeds: int = 0
    ticks: int = 0
    seconds: float = 0.0
    failed: list[Outcome] = field(default_factory=list)
    hits: Hits = field(default_factory=Hits)

    def add(self, outcome: Outcome) -> None:
        """Count one seed."""
        self.seeds += 1
        self.ticks += outcome.ticks
        if outcome.oracle:
            self.failed.append(outcome)

    def join(self, other: Sweep) -> None:
        """Count what another sweep counted."""
        self.seeds += other.seeds
        self.ticks += other.ticks
        self.seconds += other.seconds
        self.failed += other.failed
        self.hits.counts += other.hits.counts

    def summary(self) -> str:
        """One line."""
        rate = self.seeds / self.seconds if self.seconds else 0.0
        return (
            f"{self.seeds:,} seeds, {self.ticks:,} steps in {self.seconds:.1f} s: {rate:.0f} seeds/s, "
            f"{self.ticks / max(self.seconds, 1e-9):,.0f} steps/s; {len(self.failed)} failed"
        )


def sweep(seeds: Iterable[int], steps: int | None = None, *, jobs: int = 1, stop_after: int = 3) -> Sweep:
    """Play all `seeds`, in this process or in `jobs` others, until `stop_after` of them have failed."""
    total, began = Sweep(), time.monotonic()
    blocks = _blocks(seeds, steps)
    if jobs == 1:
        with few_to_collect():
            _gather(total, map(_play_block, blocks), stop_after)
    else:
        with multiprocessing.get_context("spawn").Pool(jobs, _freeze) as pool:
            _gather(total, pool.imap_unordered(_play_block, blocks), stop_after)
    total.seconds = time.monotonic() - began
    return total


@contextmanager
def few_to_collect() -> Iterator[None]:
    """What is there already is hidden from the collector, and shown again unless something was hidden before.

    A worker of the suite hides what it shares with its parent. Shown, that is walked by every later collection, and
    each of its pages is copied.
    """
    hidden = gc.get_freeze_count() > 0
    _freeze()
    try:
        yield
    finally:
        if not hidden:
            gc.unfreeze()


def _freeze() -> None:
    """Hide the modules from the collector: they are most of what there is, and never garbage."""
    gc.collect()
    gc.freeze()


def _blocks(seeds: Iterable[int], steps: int | None) -> Iterator[tuple[list[int], int | None]]:
    block: list[int] = []
    for seed in seeds:
        block.append(seed)
        if len(block) == BLOCK:
            yield block, steps
            block = []
    if block:
        yield block, steps


def _play_block(work: tuple[list[int], int | None]) -> tuple[list[Outcome], Hits]:
    """Garbage is collected between blocks only: in a run of a few milliseconds the collector finds next to nothing."""
    seeds, steps = work
    hits = Hits()
    gc.collect()
    gc.disable()
    try:
        return [play(seed, steps, hits=hits) for seed in seeds], hits
    finally:
        gc.enable()


def _gather(total: Sweep, blocks: Iterator[tuple[list[Outcome], Hits]], stop_after: int) -> None:
    for outcomes, hits in blocks:
        for outcome in outcomes:
            total.add(outcome)
            if outcome.oracle:
                _keep(outcome)
        total.hits.counts += hits.counts
        if len(total.failed) >= stop_after:
            return


def _keep(outcome: Outcome) -> None:
    """Of a run that is killed, or whose report is lost, the seeds that failed stay."""
    FAILED.parent.mkdir(exist_ok=True)
    with FAILED.open("a") as file:
        file.write(f"{outcome.seed} {outcome.oracle}: {outcome.text}\n")


def corpus() -> list[int]:
    """Seeds that once found something, in the order of the file; what follows a seed says what."""
    lines = (line.split("#")[0].split() for line in CORPUS.read_text().splitlines())
    return [int(words[0]) for words in lines if words]


def told(outcome: Outcome, steps: int | None = None) -> str:
    """The report of a failing seed: its name, the end of its story, and how to see it again."""
    story = Story(tracing=True)
    play(outcome.seed, steps, story=story)
    length = "" if steps is None else f" --steps {steps}"
    again = f"python -m tests.proofs.sim --seed {outcome.seed}{length} --trace"
    return f"SEED={outcome.seed}\n{story.tail()}\n{outcome.text}\nreplay: {again}"
