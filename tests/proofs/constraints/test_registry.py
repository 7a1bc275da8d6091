"""Which grammar library is taken: the one that was asked for, or the best of those that are installed."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from core.sampling.grammar import registry
from core.sampling.grammar.registry import choose, installed

THERE, ABSENT = ("json", "unused"), ("no_such_package", "unused")


@pytest.mark.parametrize(
    ("packages", "best"),
    [((THERE, THERE), "llguidance"), ((ABSENT, THERE), "xgrammar"), ((ABSENT, ABSENT), None)],
)
def test_auto_takes_the_best_that_is_installed(
    packages: tuple[tuple[str, str], ...], best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BACKENDS", dict(zip(("llguidance", "xgrammar"), packages, strict=True)))
    assert choose("auto") == best and choose("none") is None
    for name, package in registry.BACKENDS.items():
        assert (name in installed()) == (package is THERE)
        if package is THERE:
            assert choose(name) == name
            continue
        with pytest.raises(ConfigError, match=rf"grammar_backend is {name}, which is not installed"):
            choose(name)
