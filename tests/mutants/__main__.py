"""`python -m tests.mutants`: try every mutant and print who was killed.

Exit status 0 only when all were killed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.bare import by_folder, shrink
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant, Verdict, Workshop


def main() -> int:
    """Parse the command line, try, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="only mutants whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (%(default)s)")
    parser.add_argument("--bare", action="store_true", help="shorten the list of files without a mutant, and show it")
    asked = parser.parse_args()
    if asked.bare:
        print(by_folder(shrink(MUTANTS)))
        return 0
    chosen = [mutant for mutant in MUTANTS if asked.only in mutant.name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workshops: SimpleQueue[Workshop] = SimpleQueue()
        for number in range(asked.jobs):
            workshops.put(Workshop(Path(folder, str(number))))
        baseline = _baseline(workshops, sorted({mutant.test for mutant in chosen}), asked.jobs)
        with ThreadPoolExecutor(asked.jobs) as pool:
            verdicts = list(pool.map(lambda mutant: _try(workshops, mutant), chosen))
    killed = sum(verdict is Verdict.KILLED for verdict in verdicts)
    survivors = [m.name for m, verdict in zip(chosen, verdicts, strict=True) if verdict is not Verdict.KILLED]
    print(f"\n{killed} of {len(chosen)} mutants killed in {time.monotonic() - began:.0f} s")
    for name in survivors:
        print(f"  not killed: {name}")
    for test in baseline:
        print(f"  fails without any mutant: {test}")
    return 1 if survivors or baseline else 0


def _baseline(workshops: SimpleQueue[Workshop], tests: list[str], jobs: int) -> list[str]:
    """Named tests that fail on the unbroken code: they would kill anything."""

    def passes(test: str) -> bool:
        workshop = workshops.get()
        try:
            return workshop.passes(test)
        finally:
            workshops.put(workshop)

    with ThreadPoolExecutor(jobs) as pool:
        return [test for test, fine in zip(tests, pool.map(passes, tests), strict=True) if not fine]


def _try(workshops: SimpleQueue[Workshop], mutant: Mutant) -> Verdict:
    workshop = workshops.get()
    try:
        verdict = workshop.try_one(mutant)
    finally:
        workshops.put(workshop)
    print(f"{verdict.value:8}  {mutant.name:34}  {mutant.breaks}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
