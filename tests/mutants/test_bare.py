"""Every product file with logic has a mutant, except those on a list that may only shrink."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.bare import LIST, listed, shrink, without_mutant
from tests.mutants.catalogue import MUTANTS
from tests.mutants.logic import files_with_logic, has_logic
from tests.mutants.mutant import Mutant


def test_files_without_a_mutant_are_those_on_the_list() -> None:
    bare, on_list = without_mutant(MUTANTS), listed()
    assert on_list == sorted(set(on_list)), f"{LIST.name} is sorted and names a file once"
    new = sorted(bare - set(on_list))
    assert not new, f"these have logic and no mutant; add one to a list in tests/mutants: {new}"
    done = sorted(set(on_list) - bare)
    assert not done, f"these have a mutant, or no logic; `python -m tests.mutants --bare` takes them out: {done}"


def test_the_list_shrinks_and_never_grows(tmp_path: Path) -> None:
    first, second, *_ = files_with_logic()
    (tmp_path / "bare.txt").write_text(f"{first}\n{second}\ncore/gone.py\n")
    mutant = Mutant("m", "a law", first, "a", "b", "tests/t.py::test")
    assert shrink([mutant], tmp_path / "bare.txt") == [second]
    assert (tmp_path / "bare.txt").read_text() == f"{second}\n"


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
