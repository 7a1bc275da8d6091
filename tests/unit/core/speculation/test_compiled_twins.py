"""Compiled code makes the very drafts that Python makes, whatever rows say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.batch.spec_plan import Aim, SpecPlan, TextSeed
from core.native.host import HOST
from core.native.kept_library import ExtensionUnavailable
from core.speculation.compiled import CompiledSuffixDrafter
from core.speculation.drafter import Drafts, Ran
from core.speculation.guesses import Guesses
from core.speculation.suffix_drafter import SuffixDrafter
from core.speculation.suffix_index import BLOCK, SuffixIndex
from core.types.arrays import Ints

ROWS, MOST = 9, 6
EMPTY: Ints = np.empty(0, np.int64)


@pytest.fixture(scope="module")
def module() -> Any:
    try:
        return HOST.load()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))


def batch(fresh: Ints, seeds: list[TextSeed]) -> Any:
    return SimpleNamespace(fresh_rows=fresh, spec=SpecPlan(EMPTY, EMPTY, Aim(MOST), tuple(seeds)))


def said(rng: np.random.Generator, count: int) -> Ints:
    """Words of few, in loops or as they come: much of it was said before, some just now."""
    kind, loop = rng.integers(3), rng.integers(0, 6, int(rng.integers(1, 4)))
    if kind == 0:
        return np.resize(loop, count).astype(np.int64)
    if kind == 1:
        return np.arange(count, dtype=np.int64) + rng.integers(40)
    return rng.integers(0, 5, count)


class Twins:
    """The two drafters, told the same."""

    def __init__(self, module: Any, bytes_limit: int, rng: np.random.Generator) -> None:
        self.python, self.compiled = SuffixDrafter(bytes_limit, MOST), CompiledSuffixDrafter(module, bytes_limit, MOST)
        self.rng = rng
        self.drafted = self.guessed = 0

    def begin(self) -> None:
        """Some rows change their owner; a few of these do not speculate."""
        rng = self.rng
        fresh = rng.permutation(ROWS)[: int(rng.integers(0, 4))].astype(np.int64)
        length = int(rng.choice([0, 1, 2, 3, 9, 40, BLOCK, 5 * BLOCK + 7]))
        scopes = rng.integers(0, 3, len(fresh))
        seeds = [
            TextSeed(int(row), str(scope), said(rng, length))
            for row, scope in zip(fresh, scopes, strict=True)
            if rng.integers(5)
        ]
        self.python.begin(batch(fresh, seeds))
        self.compiled.begin(batch(fresh, seeds))

    def ran(self) -> Ran:
        rng = self.rng
        rows = rng.permutation(ROWS)[: int(rng.integers(1, ROWS))].astype(np.int64)
        counts = rng.integers(1, int(rng.choice([2, 4, 30])), len(rows))
        tokens = np.concatenate([said(rng, int(count)) for count in counts])
        return Ran(rows, np.zeros(len(rows), np.int64), counts, tokens)

    def hear(self) -> None:
        ran = self.ran()
        self.python.hear(ran)
        self.compiled.hear(ran)

    def draft(self) -> None:
        ran, aim = self.ran(), Aim(int(self.rng.integers(1, MOST + 3)), self.worth(), float(self.rng.choice([0, 0, 3])))
        one, other = self.python.draft(ran, aim), self.compiled.draft(ran, aim)
        assert_same(one, other)
        self.drafted += int(one.lens.sum())

    def worth(self) -> float:
        """Often a chance that some draft has to the last bit, or one that is a bit more."""
        rng, confidence = self.rng, self.python._confidence
        if not rng.integers(3):
            return float(rng.random())
        chance = 1.0
        for alone in confidence._right[int(rng.integers(3))][: int(rng.integers(1, MOST + 1))]:
            chance *= alone
        return float(np.nextafter(chance, 2.0)) if rng.integers(2) else chance

    def guess(self) -> None:
        rows, most = self.rng.permutation(ROWS)[:4].astype(np.int64), int(self.rng.integers(1, 20))
        one, other = self.python.guess(rows, most), self.compiled.guess(rows, most)
        assert_same(one, other)
        self.guessed += int(one.lens.sum())


def assert_same(one: Drafts | Guesses, other: Drafts | Guesses) -> None:
    assert one.lens.tolist() == other.lens.tolist()
    assert one.ids.tolist() == other.ids.tolist(), "also where they mean nothing"


@pytest.mark.parametrize("bytes_limit", [0, 1 << 14, 1 << 18])
def test_both_make_the_same_drafts(module: Any, bytes_limit: int, seed: int) -> None:
    """The smallest store has two blocks, and wraps around all the time; the largest keeps nearly all that is said."""
    twins = Twins(module, bytes_limit, np.random.default_rng(seed))
    does: list[Callable[[], None]] = [twins.begin, twins.draft, twins.draft, twins.hear, twins.hear, twins.guess]
    for number in twins.rng.integers(0, len(does), 2500):
        does[number]()
    for _ in range(BLOCK + 2):  # so many that they are noted without being asked for
        twins.hear()
    twins.draft()
    assert twins.drafted > 200 and twins.guessed > 200
    assert twins.compiled.nbytes == SuffixIndex(bytes_limit).nbytes


def test_a_prompt_is_noted_as_far_as_python_notes_it(module: Any, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 300, 40_000)
    one, other = SuffixDrafter(1 << 20, MOST), CompiledSuffixDrafter(module, 1 << 20, MOST)
    for drafter in (one, other):
        drafter.begin(batch(np.array([2]), [TextSeed(2, "", ids)]))
    for end in (100, 39_000, 39_990, 30_000):
        ran = Ran(np.array([2]), np.array([0]), np.array([8]), ids[end - 8 : end])
        assert_same(one.draft(ran, Aim(MOST)), other.draft(ran, Aim(MOST)))
