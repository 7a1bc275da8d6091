"""`python -m tests.proofs.sim.shell`: replay one seed of the shell's simulation, or sweep many.

Exits with 1 when an oracle spoke.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.proofs.sim.shell.scenario import draw
from tests.proofs.sim.shell.sweep import corpus, play, sweep, told
from tests.proofs.sim.story import Hits, Story


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    options = _parser().parse_args(argv)
    return _replay(options) if options.seed is not None else _sweep(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.sim.shell", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed and print how it went")
    parser.add_argument("--trace", action="store_true", help="with --seed: print everything that happened")
    parser.add_argument("--seeds", type=int, default=300, help="without --seed: how many to play")
    parser.add_argument("--base", type=int, help="the first of them; drawn anew if not given")
    return parser


def _replay(options: argparse.Namespace) -> int:
    story, hits = Story(tracing=True), Hits()
    print(draw(options.seed))
    outcome = play(options.seed, hits=hits, story=story)
    print("\n".join(story.lines) if options.trace else hits.table())
    print(f"seed {outcome.seed}: {outcome.seconds:.1f} virtual seconds, digest {outcome.digest & 2**64 - 1:016x}")
    print(outcome.text or "nothing to object")
    return int(bool(outcome.oracle))


def _sweep(options: argparse.Namespace) -> int:
    base = random.SystemRandom().randrange(2**40) if options.base is None else options.base
    print(f"BASE={base}: the corpus, then seeds {base} to {base + options.seeds - 1}", flush=True)
    known, found = sweep(corpus()), sweep(range(base, base + options.seeds))
    print(found.hits.table())
    print(found.summary())
    failed = [*known.failed, *found.failed]
    for outcome in failed:
        print(f"\n{told(outcome)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
