"""Every product file with logic has a mutant, and what counts as logic."""

from __future__ import annotations

import pytest

from tests.proofs.mutants.catalogue import MUTANTS
from tests.proofs.mutants.logic import files_with_logic, has_logic


def test_every_file_with_logic_has_a_mutant() -> None:
    bare = sorted(set(files_with_logic()) - {mutant.file for mutant in MUTANTS})
    assert not bare, f"these have logic and no mutant; add one to a list in tests/proofs/mutants: {bare}"


@pytest.mark.parametrize(
    "source",
    [
        "def f(a):\n    return a + 1",
        "def f(a):\n    if a:\n        return 2",
        "def f(a):\n    a.append(1)",
        "def f(a):\n    return [b for b in a]",
        "def f(a):\n    return a == 1",
        "async def f(a):\n    await a",
        "class A:\n    def f(self):\n        self.n += 1",
        "class A(Exception):\n    def __init__(self, name):\n        super().__init__(f'no {name}')",
        "def f():\n    def g(a):\n        return not a\n    return g",
        "KEY = lambda a: a.first - a.second",
        "register(1)",
        "if platform:\n    A = 1",
    ],
)
def test_what_can_be_broken_is_logic(source: str) -> None:
    assert has_logic(source)


@pytest.mark.parametrize(
    "source",
    [
        "from a import b\nimport c",
        "A = 1 << 20\nB = {name: field(name) for name in ('a', 'b')}\nC = int | str",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a",
        "@dataclass\nclass A:\n    b: int | None = None\n    c: list[int] = field(default_factory=list)",
        "class A(Protocol):\n    @property\n    def b(self) -> int: ...\n    def c(self) -> int:\n        return 1 + 1",
        "class A:\n    @abstractmethod\n    def b(self) -> int | None:\n        return len(self)",
        "class A:\n    def b(self) -> int | None:\n        'Text.'\n        return self._b",
        "class A:\n    def b(self):\n        raise NotImplementedError('b')",
        "class A(Error):\n    reason = 'A'",
    ],
)
def test_what_only_declares_is_not(source: str) -> None:
    assert not has_logic(source)
