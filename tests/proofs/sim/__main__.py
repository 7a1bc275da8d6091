"""`python -m tests.proofs.sim`: replay one seed, or sweep many. Exits with 1 when an oracle spoke."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys

import torch

from tests.proofs.sim.scenario import draw
from tests.proofs.sim.story import Hits, Story
from tests.proofs.sim.sweep import corpus, play, sweep, told


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    options = _parser().parse_args(argv)
    # Two processes that each use every core are slower than one.
    torch.set_num_threads(1)
    if options.seen:
        return _seen()
    return _replay(options) if options.seed is not None else _sweep(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed and print how it went")
    parser.add_argument(
        "--steps", type=int, help="steps with input, before everybody may finish; by default what the seed draws"
    )
    parser.add_argument("--trace", action="store_true", help="with --seed: print every decision")
    parser.add_argument("--seeds", type=int, default=2000, help="without --seed: how many to play")
    parser.add_argument("--base", type=int, help="the first of them; drawn anew if not given")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0 takes one per core")
    parser.add_argument("--seen", action="store_true", help="find the seed that shows each mutant; writes seen.txt")
    return parser


def _seen() -> int:
    """Needs what the tests need, so it is imported here; `test_oracles` imports every list of mutants."""
    from tests.proofs.sim import seen, test_oracles

    assert test_oracles.MUTANTS
    seen.write()
    return 0


def _replay(options: argparse.Namespace) -> int:
    story, hits = Story(tracing=True), Hits()
    print(draw(options.seed))
    outcome = play(options.seed, options.steps, hits=hits, story=story)
    print("\n".join(story.lines) if options.trace else hits.table())
    print(f"seed {outcome.seed}: {outcome.ticks} steps, digest {outcome.digest & 2**64 - 1:016x}")
    print(outcome.text or "nothing to object")
    return int(bool(outcome.oracle))


def _sweep(options: argparse.Namespace) -> int:
    base = random.SystemRandom().randrange(2**40) if options.base is None else options.base
    jobs = options.jobs or os.cpu_count() or 1
    print(f"BASE={base} COMMIT={_commit()}: the corpus, then seeds {base} to {base + options.seeds - 1}", flush=True)
    known = sweep(corpus(), options.steps)
    found = sweep(range(base, base + options.seeds), options.steps, jobs=jobs)
    print(found.hits.table())
    print(found.summary())
    failed = [*known.failed, *found.failed]
    for outcome in failed:
        print(f"\n{told(outcome, options.steps)}", file=sys.stderr)
    return int(bool(failed))


def _commit() -> str:
    try:
        shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return shown.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
