"""Many seeds, and what to do with those that fail; as `tests.proofs.sim.sweep`, for the shell."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from core.invariants import InvariantViolation
from tests.proofs.sim.ledger import LedgerViolation
from tests.proofs.sim.shell.scenario import draw
from tests.proofs.sim.shell.world import ShellWorld
from tests.proofs.sim.story import Hits, Story, Violation
from tests.proofs.sim.sweep import few_to_collect

CORPUS = Path(__file__).with_name("corpus.txt")
BLOCK = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a seed ended. `oracle` saw the violation; empty when none did. `seconds` are virtual."""

    seed: int
    seconds: float
    digest: int
    oracle: str = ""
    text: str = ""


def play(seed: int, *, hits: Hits | None = None, story: Story | None = None) -> Outcome:
    """Run one seed; every exception becomes the outcome, named by who raised it."""
    story = story or Story()
    world = ShellWorld(draw(seed), story, hits or Hits())
    try:
        world.run()
        oracle, text = "", ""
    except Violation as violation:
        oracle, text = violation.oracle, str(violation)
    except LedgerViolation as violation:
        oracle, text = f"ledger:{violation.entry.fault.value}", str(violation)
    except InvariantViolation as violation:
        oracle, text = f"invariant:{violation.name}", str(violation)
    except Exception as error:  # whatever the shell raises is a finding
        oracle, text = f"crash:{type(error).__name__}", f"{type(error).__name__}: {error}"
    return Outcome(seed, world.loop.now, story.digest, oracle, text)


@dataclass(slots=True)
class Sweep:
    """What a range of seeds came to."""

    seeds: int = 0
    seconds: float = 0.0
    failed: list[Outcome] = field(default_factory=list)
    hits: Hits = field(default_factory=Hits)

    def summary(self) -> str:
        """One line."""
        rate = self.seeds / max(self.seconds, 1e-9)
        return f"{self.seeds:,} seeds in {self.seconds:.1f} s: {rate:.0f} seeds/s; {len(self.failed)} failed"


def sweep(seeds: Iterable[int], *, stop_after: int = 3) -> Sweep:
    """Play `seeds` one after another, until `stop_after` of them have failed."""
    total, began = Sweep(), time.monotonic()
    with few_to_collect():
        gc.disable()
        try:
            for seed in seeds:
                outcome = play(seed, hits=total.hits)
                total.seeds += 1
                if outcome.oracle:
                    total.failed.append(outcome)
                    if len(total.failed) >= stop_after:
                        break
                if total.seeds % BLOCK == 0:
                    gc.collect()
        finally:
            gc.enable()
    total.seconds = time.monotonic() - began
    return total


def corpus() -> list[int]:
    """Seeds that once found something, in the order of the file; what follows a seed says what."""
    lines = (line.split("#")[0].split() for line in CORPUS.read_text().splitlines())
    return [int(words[0]) for words in lines if words]


def told(outcome: Outcome) -> str:
    """The report of a failing seed: its name, the end of its story, and how to see it again."""
    story = Story(tracing=True)
    play(outcome.seed, story=story)
    again = f"python -m tests.proofs.sim.shell --seed {outcome.seed} --trace"
    return f"SEED={outcome.seed}\n{story.tail()}\n{outcome.text}\nreplay: {again}"
