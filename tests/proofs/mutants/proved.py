"""The ledger of kills: for each mutant, a digest of what it was, and of its product and test file, when it was killed.

A mutant whose digest is another now has changed, or what it breaks, or what should notice: it has to be tried again.
Moves and prose are no change: a digest has no paths in it, no docstrings and comments, and of an import only the names
that it binds.
Lines are `name digest`. A name may have several, for two branches that both added theirs are merged line by line.
"""

from __future__ import annotations

import ast
import hashlib
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path

from tests.proofs.mutants.mutant import Mutant
from tests.support.repository import ROOT

LEDGER = Path(__file__).with_name("proved.txt")


def digest(mutant: Mutant, root: Path = ROOT) -> str:
    """Of the mutant's own fields but for paths, and of what both files say; 16 hexadecimal digits."""
    test_file, _, test = mutant.test.partition("::")
    texts = [_as_run((root / name).read_text(), name) for name in (mutant.file, test_file)]
    fields = astuple(replace(mutant, file=Path(mutant.file).suffix, test=test))
    return hashlib.sha256(repr((fields, texts)).encode()).hexdigest()[:16]


@cache
def _as_run(text: str, name: str) -> tuple[str, list[tuple[str, str]]]:
    """What the interpreter sees of a file, and the names of its imports; all of its text if it is not Python.

    Comments, docstrings, formatting and the modules that names come from are left out. Kept: two thousand mutants, and
    two ledgers, ask of a thousand files, and took half a minute to read them anew each time.
    """
    if not name.endswith(".py"):
        return text, []
    stripper = _Stripper()
    return ast.dump(stripper.visit(ast.parse(text))), sorted(stripper.bound)


class _Stripper(ast.NodeTransformer):
    """Takes out imports and docstrings, those below variables included.

    `bound` keeps of each import what it binds: the last part of its name, and the name that it has in the file.
    """

    def __init__(self) -> None:
        self.bound: set[tuple[str, str]] = set()

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.bound |= {(alias.name.rpartition(".")[2], alias.asname or alias.name) for alias in node.names}

    visit_ImportFrom = visit_Import

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else self.generic_visit(node)


class Ledger:
    """Which mutants were killed as they are now."""

    def __init__(self, text: str = "", root: Path = ROOT) -> None:
        self._root = root
        self._digests: dict[str, set[str]] = defaultdict(set)
        for name, found in (line.split() for line in text.splitlines()):
            self._digests[name].add(found)

    def holds(self, mutant: Mutant) -> bool:
        """Whether it was killed as it is now."""
        return digest(mutant, self._root) in self._digests[mutant.name]

    def record(self, mutant: Mutant, *, killed: bool, tree: Path) -> None:
        """The outcome of a trial in `tree` replaces what was known of the mutant."""
        self._digests[mutant.name] = {digest(mutant, tree)} if killed else set()

    def text(self, mutants: Iterable[Mutant]) -> str:
        """The lines of these mutants, sorted; of several digests of one only the present one."""
        lines = []
        for mutant in mutants:
            found = self._digests[mutant.name]
            now = digest(mutant, self._root)
            lines += [f"{mutant.name} {each}\n" for each in ({now} if now in found else found)]
        return "".join(sorted(lines))


def ledger_of(revision: str) -> Ledger | None:
    """The ledger that was committed there; None without Git, that revision or a ledger in it."""
    name = LEDGER.relative_to(ROOT).as_posix()
    try:
        shown = subprocess.run(
            ["git", "show", f"{revision}:{name}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    except OSError:
        return None
    return Ledger(shown.stdout) if shown.returncode == 0 else None


def due(mutants: Sequence[Mutant], ledgers: Sequence[Ledger], draw: int, seed: int) -> list[Mutant]:
    """Mutants to try, the most urgent first: those that a ledger lacks, ledger by ledger, then `draw` of the others.

    The order within each group is that of `seed`, so that a budget of time leaves out different ones.
    """
    shuffled = random.Random(seed).sample(mutants, len(mutants))
    chosen: list[Mutant] = []
    for ledger in ledgers:
        chosen += [mutant for mutant in shuffled if mutant not in chosen and not ledger.holds(mutant)]
    others = [mutant for mutant in shuffled if mutant not in chosen]
    return chosen + others[:draw]
