"""The libraries that compile constraints, best first; both are optional."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Protocol

from core.errors import ConfigError
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint
from core.types.grammar import Grammar

INSTALL = "pip install 'slipstream[grammar]'"


class GrammarError(Exception):
    """A constraint cannot be compiled; the message is the library's own."""


class Backend(Protocol):
    """One library, set up for one vocabulary. `compile` may be called from any thread."""

    name: str

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile `constraint`. Raises GrammarError if the library cannot."""
        ...


BACKENDS: dict[str, tuple[str, str]] = {
    "llguidance": ("llguidance", "core.sampling.grammar.llguidance_backend"),
    "xgrammar": ("xgrammar", "core.sampling.grammar.xgrammar_backend"),
}
"""Name -> (package that it needs, module here that adapts it). Each module has `build(vocabulary) -> Backend`."""


def installed() -> tuple[str, ...]:
    """Names of the backends whose package is installed, best first."""
    return tuple(name for name, (package, _) in BACKENDS.items() if importlib.util.find_spec(package) is not None)


def choose(wanted: str) -> str | None:
    """The backend to use: None when `wanted` is "none", or "auto" with nothing installed.

    Raises ConfigError when `wanted` names a backend that is not installed.
    """
    if wanted == "none":
        return None
    there = installed()
    if wanted == "auto":
        return there[0] if there else None
    if wanted not in there:
        raise ConfigError(f"grammar_backend is {wanted}, which is not installed; {INSTALL}, or take another")
    return wanted


def build_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Import and set up a backend; takes up to seconds for large vocabularies."""
    build: Callable[[Vocabulary], Backend] = importlib.import_module(BACKENDS[name][1]).build
    return build(vocabulary)
