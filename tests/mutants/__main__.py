"""`python -m tests.mutants`: try every mutant, and say which assertion killed it.

Exit status 0 only when all were killed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from tests.mutants.bare import by_folder, shrink
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant, Verdict
from tests.mutants.workshop import Trial, Workshop

T = TypeVar("T")


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
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
        benches = Benches([Workshop(Path(folder, str(number))) for number in range(asked.jobs)])
        stack.callback(benches.close)
        trials = benches.each(chosen, _try)
        tests = sorted({mutant.test for mutant in chosen})
        passed = benches.each(tests, lambda workshop, test: workshop.passes(test))
        baseline = [test for test, fine in zip(tests, passed, strict=True) if not fine]
    return _report(list(zip(chosen, trials, strict=True)), baseline, time.monotonic() - began)


class Benches:
    """Workshops that work beside each other."""

    def __init__(self, workshops: list[Workshop]) -> None:
        self._workshops = workshops
        self._free: SimpleQueue[Workshop] = SimpleQueue()
        for workshop in workshops:
            self._free.put(workshop)

    def close(self) -> None:
        """End all of them."""
        for workshop in self._workshops:
            workshop.close()

    def each(self, jobs: list, do: Callable[[Workshop, object], T]) -> list[T]:
        """`do` for each job, in the first workshop that is free."""

        def one(job: object) -> T:
            workshop = self._free.get()
            try:
                return do(workshop, job)
            finally:
                self._free.put(workshop)

        with ThreadPoolExecutor(len(self._workshops)) as pool:
            return list(pool.map(one, jobs))


def _try(workshop: Workshop, mutant: Mutant) -> Trial:
    trial = workshop.try_one(mutant)
    print(f"{trial.verdict.value:8}  {mutant.name:34}  {trial.seconds:5.1f} s  {mutant.breaks}", flush=True)
    print(f"{'':10}{trial.test or mutant.test}\n{'':10}{trial.where} {trial.text}", flush=True)
    return trial


def _report(tried: list[tuple[Mutant, Trial]], baseline: list[str], seconds: float) -> int:
    others = [(mutant, trial) for mutant, trial in tried if trial.verdict is not Verdict.KILLED]
    print(f"\n{len(tried) - len(others)} of {len(tried)} mutants killed in {seconds:.0f} s")
    for mutant, trial in others:
        print(f"  {trial.verdict.value}: {mutant.name} ({trial.how}) {trial.where} {trial.text}")
    for test in baseline:
        print(f"  fails without any mutant: {test}")
    return 1 if others or baseline else 0


if __name__ == "__main__":
    sys.exit(main())
