"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Literal


class Verdict(Enum):
    """What a trial says of the named test.

    KILLED: it failed by an assertion of its own, or by what the mutant declares. SURVIVED: it passed. HANGS: a bound
    on time ended it. BROKEN: it crashed, could not be run or was skipped, so nothing was learned.
    """

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    HANGS = "HANGS"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace `before`, which occurs exactly once in `file`, by `after`; `test` must then fail.

    `breaks` names the law, invariant or promise that is broken, in words. `dies_by` is how the test may fail: by an
    `assertion` of its own always; by an `invariant`, an assertion of the product (`core.invariants`), where the mutant
    breaks what that guards; by a `timeout` where the law is that something ends. `needs` names a package, without which
    the test skips and the mutant cannot be tried.
    """

    name: str
    breaks: str
    file: str
    before: str
    after: str
    test: str
    dies_by: Literal["assertion", "invariant", "timeout"] = "assertion"
    needs: str = ""

    @property
    def can_be_tried(self) -> bool:
        """Whether the package that its test needs is installed."""
        return not self.needs or find_spec(self.needs) is not None

    def applied(self, source: str) -> str:
        """`source` with the mutation. Raises ValueError when the line it breaks is no longer there, or not alone."""
        found = source.count(self.before)
        if found != 1:
            raise ValueError(f"{self.name}: {self.before!r} occurs {found} times in {self.file}")
        return source.replace(self.before, self.after)

    def verdict(self, how: str) -> Verdict:
        """`how` is what `tests.proofs.mutants.witness` saw."""
        if how in ("assertion", self.dies_by):
            return Verdict.KILLED
        return {"passed": Verdict.SURVIVED, "timeout": Verdict.HANGS}.get(how, Verdict.BROKEN)
