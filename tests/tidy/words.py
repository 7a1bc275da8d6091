"""Words that mean "not finished". Work that is left is an issue, not a comment."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.tidy.source import Source

# In two parts, so that this file does not find itself.
BANNED = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")


def unfinished(sources: Iterable[Source]) -> list[str]:
    """Lines with such a word, in code, comments and documents alike."""
    return [
        source.at(number, f"says {found.group()}")
        for source in sources
        for number, line in enumerate(source.text.splitlines(), start=1)
        if (found := BANNED.search(line))
    ]
