"""Production code broken on purpose, one rule at a time, for `test_oracles`: the list, and how to get onto it.

Checks of production that would speak first are patched away with the rule where the point is that the simulation sees
it too. Not on the list, because they are no bugs: pushing a waiting request into the heap twice (removal is lazy and by
identity), and keeping a request that ends in the list of new owners (a step that admits somebody is always frozen, so
the list is empty whenever anybody ends).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`seen_by`: the oracles of which one must speak first. `real`: only the production step can show it. `seeds`: in
    others something else speaks first; none for the first hundred. `policy`: only seeds with this one can; empty for
    any. `drafts`: only seeds that verify drafts can. `scene`: a scripted run that shows it, where seeds do too rarely.
    """

    name: str
    seen_by: tuple[str, ...]
    apply: Break
    real: bool = False
    seeds: tuple[int, ...] = ()
    policy: str = ""
    scene: Callable[[], None] | None = None
    drafts: bool = False


MUTANTS: list[Mutant] = []


def mutant(
    *seen_by: str,
    real: bool = False,
    seeds: tuple[int, ...] = (),
    policy: str = "",
    scene: Callable[[], None] | None = None,
    drafts: bool = False,
) -> Callable[[Break], Break]:
    """Put a function into the list."""

    def enter(apply: Break) -> Break:
        MUTANTS.append(Mutant(apply.__name__, seen_by, apply, real, seeds, policy, scene, drafts))
        return apply

    return enter


def put(patch: Patch, owner: Any, name: str, function: Any) -> None:
    """Replace a method; `function` gets the replaced one first."""
    old = getattr(owner, name)

    def new(*args: Any, **kwargs: Any) -> Any:
        return function(old, *args, **kwargs)

    patch.setattr(owner, name, new)
