"""Keeps `core/INVARIANTS.md` and the closed lists of check names equal."""

from __future__ import annotations

import re
from collections.abc import Iterable

# A heading or the first cell of a table row that begins with a name in backticks.
_EXPLAINED = re.compile(r"^(?:#{1,6}\s+|\|\s*)`([a-z][a-z0-9_]*)`", re.MULTILINE)


def differences(names: Iterable[str], document: str) -> list[str]:
    """Checks that nobody explains, and explanations of checks that do not exist or come twice."""
    known, explained = list(names), _EXPLAINED.findall(document)
    findings = [f"{name} is checked but not explained" for name in known if name not in explained]
    findings += [f"{name} is explained but not checked" for name in explained if name not in known]
    findings += [f"{name} is named twice" for name in sorted(set(known)) if known.count(name) > 1]
    return findings
