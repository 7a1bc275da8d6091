"""What a mutant is, and how one is tried."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("core", "service", "tests", "protos", "pyproject.toml")
CACHE = "build/cache"
TIMEOUT_SECONDS = 180


class Verdict(Enum):
    """KILLED: the named test failed. SURVIVED: it passed. BROKEN: it could not be run, so nothing was learned."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace `before`, which occurs exactly once in `file`, by `after`; `test` must then fail.

    `breaks` names the law, invariant or promise that is broken, in words.
    """

    name: str
    breaks: str
    file: str
    before: str
    after: str
    test: str

    def applied(self, source: str) -> str:
        """`source` with the mutation. Raises ValueError when the line it breaks is no longer there, or not alone."""
        found = source.count(self.before)
        if found != 1:
            raise ValueError(f"{self.name}: {self.before!r} occurs {found} times in {self.file}")
        return source.replace(self.before, self.after)


class Workshop:
    """A copy of the tree in which one mutant at a time is tried; the repository itself is never touched."""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
            else:
                shutil.copy(source, directory / name)
        # Native code is compiled anew only where a mutant breaks that.
        (directory / "build").mkdir()
        (ROOT / CACHE).mkdir(parents=True, exist_ok=True)
        (directory / CACHE).symlink_to(ROOT / CACHE)

    def try_one(self, mutant: Mutant) -> Verdict:
        """Apply, run the named test, restore."""
        path = self._root / mutant.file
        original = path.read_text()
        path.write_text(mutant.applied(original))
        try:
            return self._run(mutant.test)
        finally:
            path.write_text(original)

    def passes(self, test: str) -> bool:
        """Whether the test passes on the unbroken copy: else its failure on a broken one would prove nothing."""
        return self._run(test) is Verdict.SURVIVED

    def _run(self, test: str) -> Verdict:
        # A hang is a death like any other: several mutants end in a livelock.
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=60", test]
        try:
            done = subprocess.run(command, cwd=self._root, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return Verdict.KILLED
        return {0: Verdict.SURVIVED, 1: Verdict.KILLED}.get(done.returncode, Verdict.BROKEN)
