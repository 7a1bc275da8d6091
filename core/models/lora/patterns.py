"""Which modules a PEFT configuration names: suffixes, or regular expressions with a bounded cost.

`re` holds the interpreter lock while it backtracks, so a hostile expression in an adapter would stop every stream. Only
expressions whose cost is a small polynomial of the name's length are run; PEFT writes no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from core.errors import ModelLoadError

MAX_PATTERN_CHARS = 512
MAX_REPEATS = 3
"""Unbounded repetitions in one expression: a name of n characters costs at most about n^3 steps."""

_QUANTIFIED_GROUP = re.compile(r"\)[*+?{]")
_ESCAPED = re.compile(r"\\.")
_REPEAT = re.compile(r"[*+?{]")
_REFERENCE = re.compile(r"\\[1-9]|\(\?P=|\(\?\(")


def compiled(pattern: str, field: str) -> re.Pattern[str]:
    """Compile `pattern`.

    Raises ModelLoadError naming `field` if it is too long, no regular expression, or could backtrack for ever.
    """
    plain = _ESCAPED.sub("", pattern)
    # A group that is repeated, or refers back, makes the cost exponential; `(?:` and its kin only open a group.
    opened = plain.replace("(?", "(")
    risky = _QUANTIFIED_GROUP.search(plain) or len(_REPEAT.findall(opened)) > MAX_REPEATS or _REFERENCE.search(pattern)
    if len(pattern) > MAX_PATTERN_CHARS or risky:
        raise ModelLoadError(f"{field} has an expression that is too costly to match")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelLoadError(f"{field} is no regular expression: {error}") from error


def ends_with(name: str, suffixes: Iterable[str]) -> bool:
    """Whether `name` is one of `suffixes` or ends with one after a dot."""
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)


def pattern_value(patterns: Mapping[re.Pattern[str], int], name: str, default: int) -> int:
    """The value of the first pattern that matches a dotted end of `name`, as PEFT's `get_pattern_key` finds it."""
    parts = name.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    return next((value for pattern, value in patterns.items() if any(map(pattern.fullmatch, ends))), default)
