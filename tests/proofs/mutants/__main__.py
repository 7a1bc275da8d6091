"""Break the code line by line and see which assertion of the named test notices.

    python -m tests.proofs.mutants                    all of them: `make mutants`
    python -m tests.proofs.mutants --only page-need   while you write one
    python -m tests.proofs.mutants --changed          before you commit: those that your change has made doubtful

A mutant that was killed is entered in tests/proofs/mutants/proved.txt with a digest of itself, of the file that it
breaks and of its test's file: commit that. `--changed` tries those whose digest is another by now. .ci/run does so
too, tries again what the last commit entered, and some others that the tree's seed draws, as many as fit into its
budget.

Exit status 0 only when all that were tried were killed, and none that has changed since was left untried.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from tests.proofs.mutants.catalogue import MUTANTS
from tests.proofs.mutants.mutant import Mutant, Verdict
from tests.proofs.mutants.proved import LEDGER, Ledger, due, ledger_of
from tests.proofs.mutants.workshop import Trial, Workshop

J = TypeVar("J")


def main() -> int:
    """Parse the command line, choose, try, report, enter."""
    began = time.monotonic()
    asked = _parser().parse_args()
    ledger = Ledger(LEDGER.read_text() if LEDGER.exists() else "")
    chosen = _chosen(asked, ledger)
    untried = [mutant.needs for mutant in chosen if not mutant.can_be_tried]
    chosen = [mutant for mutant in chosen if mutant.can_be_tried]
    book = Book(ledger, trusting=asked.judge, end=began + asked.budget if asked.budget else float("inf"))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
        # Tests that become another user import the copy.
        Path(folder).chmod(0o755)
        benches = Benches([Workshop(Path(folder, str(number))) for number in range(asked.jobs)])
        stack.callback(benches.close)
        if not asked.judge:
            # Also of a run that is interrupted.
            stack.callback(lambda: LEDGER.write_text(ledger.text(MUTANTS)))
        benches.each(chosen, book.enter)
    left = [mutant for mutant in chosen if mutant not in [tried for tried, _ in book.tried]]
    print(f"\n{book.summary(time.monotonic() - began, len(left))}")
    if untried:
        print(f"  {len(untried)} not tried, for want of {', '.join(sorted(set(untried)))}")
    doubtful = [mutant.name for mutant in left if not ledger.holds(mutant)]
    if doubtful:
        print(f"  {len(doubtful)} of them changed since they were killed: python -m tests.proofs.mutants --changed")
    return 0 if not doubtful and all(trial.verdict is Verdict.KILLED for _, trial in book.tried) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only mutants whose name contains TEXT")
    parser.add_argument("--changed", action="store_true", help="only mutants that the ledger does not have as they are")
    parser.add_argument(
        "--since", metavar="REV", help="with --changed: also those that the ledger of REV does not have"
    )
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="with --changed: also N that the seed draws")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no trial later; says how many are left")
    parser.add_argument("--judge", action="store_true", help="enter nothing, and trust that the tests pass unbroken")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (%(default)s)")
    return parser


def _chosen(asked: argparse.Namespace, ledger: Ledger) -> list[Mutant]:
    """In the order in which they are tried."""
    named = [mutant for mutant in MUTANTS if asked.only in mutant.name]
    if not asked.changed:
        return named
    before = ledger_of(asked.since) if asked.since else None
    seed = int(os.environ.get("SLIPSTREAM_TEST_SEED", "0"))
    return due(named, [ledger, *([before] if before else [])], asked.draw, seed)


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

    def each(self, jobs: Sequence[J], do: Callable[[Workshop, J], None]) -> None:
        """`do` for each job in order, in the first workshop that is free."""

        def one(job: J) -> None:
            workshop = self._free.get()
            try:
                do(workshop, job)
            finally:
                self._free.put(workshop)

        with ThreadPoolExecutor(len(self._workshops)) as pool:
            try:
                for _ in pool.map(one, jobs):
                    pass
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise


class Book:
    """What became of each mutant of this run. No trial begins after `end`, an instant of `time.monotonic`."""

    def __init__(self, ledger: Ledger, *, trusting: bool, end: float) -> None:
        self.tried: list[tuple[Mutant, Trial]] = []
        self._ledger = ledger
        self._trusting = trusting
        self._end = end
        self._sound: dict[str, bool] = {}

    def enter(self, workshop: Workshop, mutant: Mutant) -> None:
        """Try it, and print and note what came of it."""
        if time.monotonic() >= self._end:
            return
        trial = workshop.try_one(mutant)
        if trial.verdict is Verdict.KILLED and not self._passes(workshop, mutant.test):
            trial = replace(trial, verdict=Verdict.BROKEN, text=f"fails without any mutant: {trial.text}")
        self.tried.append((mutant, trial))
        self._ledger.record(mutant, killed=trial.verdict is Verdict.KILLED, tree=workshop.root)
        print(
            f"{trial.verdict.value:8}  {mutant.name:34}  {trial.seconds:5.1f} s  {mutant.breaks}\n"
            f"{'':10}{trial.test or mutant.test}\n{'':10}{trial.where}  {trial.text}",
            flush=True,
        )

    def _passes(self, workshop: Workshop, test: str) -> bool:
        """On the unbroken copy, tried once per test: what fails there would kill anything."""
        if test not in self._sound:
            self._sound[test] = self._trusting or workshop.passes(test)
        return self._sound[test]

    def summary(self, seconds: float, left: int) -> str:
        """How many died, which did not, and which died by anything but an assertion of their test."""
        killed = [(mutant, trial) for mutant, trial in self.tried if trial.verdict is Verdict.KILLED]
        lines = [f"{len(killed)} of {len(self.tried)} mutants killed in {seconds:.0f} s"]
        if left:
            lines.append(f"  {left} more did not fit into the budget and were not tried")
        for how in ("invariant", "timeout"):
            names = [mutant.name for mutant, trial in killed if trial.how == how]
            if names:
                lines.append(f"  {len(names)} by {how}, as declared: {', '.join(names)}")
        for mutant, trial in self.tried:
            if trial.verdict is not Verdict.KILLED:
                lines.append(f"  {trial.verdict.value}: {mutant.name} ({trial.how}) {trial.where} {trial.text}")
        return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
