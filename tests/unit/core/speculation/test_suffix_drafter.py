"""What a drafter of suffixes makes of steps: in Python, and in compiled code, which drafts the very same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.batch.spec_plan import Aim, SpecPlan, TextSeed
from core.native.host import HOST, HostCode
from core.native.kept_library import ExtensionUnavailable
from core.speculation.compiled import CompiledSuffixDrafter, UpgradingDrafter
from core.speculation.drafter import Ran
from core.speculation.suffix_drafter import SuffixDrafter
from core.speculation.suffix_index import BLOCK, SuffixIndex
from core.types.arrays import Ints

SMALL = 1 << 16
EMPTY: Ints = np.empty(0, np.int64)
AnyDrafter = SuffixDrafter | CompiledSuffixDrafter | UpgradingDrafter
New = Callable[[int, int], AnyDrafter]
"""(bytes of the index, most drafts) -> drafter."""


def compiled(bytes_limit: int, most: int) -> CompiledSuffixDrafter:
    try:
        return CompiledSuffixDrafter(HOST.load(), bytes_limit, most)
    except ExtensionUnavailable as reason:
        pytest.skip(f"no native code here: {reason}")


@pytest.fixture(params=[SuffixDrafter, compiled], ids=["python", "compiled"])
def new(request: pytest.FixtureRequest) -> New:
    made: New = request.param
    return made


def batch(fresh: list[int], seeds: list[TextSeed]) -> Any:
    spec = SpecPlan(EMPTY, EMPTY, Aim(4), tuple(seeds))
    return SimpleNamespace(fresh_rows=np.array(fresh, np.int64), spec=spec)


def ran(*rows: tuple[int, list[int]]) -> Ran:
    """Rows with the tokens that each got."""
    tokens = [token for _, got in rows for token in got]
    counts, lens = np.array([len(got) for _, got in rows]), np.zeros(len(rows), np.int64)
    return Ran(np.array([row for row, _ in rows]), lens, counts, np.array(tokens, np.int64))


def drafts_of(drafter: AnyDrafter, what: Ran, most: int = 4, worth: float = 0.0) -> list[list[int]]:
    if most == 0:
        drafter.hear(what)
        return [[]] * len(what.rows)
    found = drafter.draft(what, Aim(most, worth))
    return [ids[:count] for ids, count in zip(found.ids.tolist(), found.lens.tolist(), strict=True)]


def test_rows_draft_from_prompts_and_from_each_other(new: New) -> None:
    drafter = new(SMALL, 4)
    prompt = np.arange(100, 120)
    drafter.begin(batch([3, 5], [TextSeed(3, "a", prompt), TextSeed(5, "a", prompt[:1] - 50)]))
    assert drafts_of(drafter, ran((3, [105, 106]), (5, [107, 108]))) == [[107, 108, 109, 110], [109, 110, 111, 112]]


def test_a_row_without_a_seed_gets_no_drafts_and_shifts_no_other(new: New) -> None:
    drafter = new(SMALL, 4)
    drafter.begin(batch([3, 5], [TextSeed(5, "a", np.arange(100, 120))]))
    assert drafts_of(drafter, ran((3, [1, 2, 3]), (5, [105, 106]))) == [[], [107, 108, 109, 110]]


def test_a_new_owner_goes_on_with_its_own_text(new: New) -> None:
    drafter = new(SMALL, 4)
    drafter.begin(batch([3], [TextSeed(3, "a", np.arange(100, 120))]))
    drafts_of(drafter, ran((3, [105])))
    drafter.begin(batch([3], [TextSeed(3, "b", np.array([1, 105]))]))
    assert drafts_of(drafter, ran((3, [106]))) == [[]], "of another scope"


def test_tokens_are_noted_where_no_drafts_are_wanted(new: New) -> None:
    drafter = new(SMALL, 4)
    drafter.begin(batch([3], [TextSeed(3, "a", np.arange(100, 120))]))
    assert drafts_of(drafter, ran((3, [1, 2, 3, 4])), most=0) == [[]]
    assert drafts_of(drafter, ran((3, [9, 1, 2]))) == [[3, 4, 9, 1]]


def test_a_new_owner_that_does_not_speculate_has_no_text(new: New) -> None:
    drafter = new(SMALL, 4)
    drafter.begin(batch([3], [TextSeed(3, "a", np.arange(100, 120))]))
    drafter.begin(batch([3], []))
    assert drafts_of(drafter, ran((3, [105, 106]))) == [[]]


def test_what_was_wrong_before_is_not_proposed_until_it_is_right_again(new: New) -> None:
    """Drafts by two tokens are always wrong at their second place, then right; those by eight are right."""
    drafter = new(1 << 20, 4)
    drafter.begin(batch([1, 2], [TextSeed(1, "a", np.arange(100, 120)), TextSeed(2, "a", np.array([7]))]))
    ask = lambda came: drafts_of(drafter, ran((1, [110, 111]), (2, came)), worth=0.5)[0]  # noqa: E731
    # The first row says 110, 111 again and again, and goes on with 112 and another number each time.
    for number in range(1000, 1200):
        drafts_of(drafter, ran((1, [110, 111])), worth=0.5)
        drafts_of(drafter, ran((1, [112, number, number + 500])), worth=0.5)
    assert ask([8]) == [112]
    for _ in range(200):
        drafts_of(drafter, ran((1, [110, 111])), worth=0.5)
        drafts_of(drafter, ran((1, [112, 113, 114])), worth=0.5)
    assert ask([9])[:3] == [112, 113, 114]


def test_drafts_that_together_bring_less_than_verifying_costs_are_left_out(new: New) -> None:
    """Two rows have three drafts each, of which 0.8 + 0.64 + 0.51 are expected to be right; a third row has none."""
    seeds = [TextSeed(row, "a", np.arange(100 * row, 100 * row + 3)) for row in (1, 2, 3)]
    for least, proposed in ((3.9, 3), (4.0, 0)):
        drafter = new(1 << 20, 4)
        drafter.begin(batch([1, 2, 3], seeds))
        found = drafter.draft(ran((1, [200, 201]), (2, [100, 101]), (3, [7])), Aim(4, least=least))
        assert found.lens.tolist() == [proposed, proposed, 0], "of both rows or of none"


@pytest.mark.parametrize("tokens", [1, 5, BLOCK - 1, BLOCK, 3 * BLOCK])
def test_what_was_heard_while_no_drafts_were_wanted_is_noted_all_the_same(tokens: int, new: New) -> None:
    drafter, said = new(1 << 20, 4), list(range(1000, 1000 + tokens + 6))
    drafter.begin(batch([1, 2], [TextSeed(1, "a", np.arange(3)), TextSeed(2, "a", np.arange(5))]))
    for token in said:
        drafts_of(drafter, ran((1, [token])), most=0)
    # The row is given away before its text was asked for.
    drafter.begin(batch([1], []))
    assert drafts_of(drafter, ran((2, said[tokens : tokens + 2]))) == [said[tokens + 2 :]]


def test_rows_that_were_heard_together_keep_their_own_texts(new: New) -> None:
    drafter = new(1 << 20, 4)
    drafter.begin(batch([1, 2], [TextSeed(1, "a", np.arange(3)), TextSeed(2, "a", np.arange(5))]))
    for step in range(20):
        # Two steps that are heard of at once, of which the second has the first row alone.
        drafts_of(drafter, ran((1, [100 + 2 * step]), (2, [500 + step]), (1, [101 + 2 * step])), most=0)
    found = drafts_of(drafter, ran((1, [505, 506]), (2, [107, 108])))
    assert found == [[507, 508, 509, 510], [109, 110, 111, 112]]


def play(drafter: AnyDrafter, seed: int, most: int, operations: int) -> list[Any]:
    """Everything that it says in a long random course: rows change owners, scopes and whether they speculate."""
    rng, said = np.random.default_rng(seed), list[Any]()
    texts = dict[int, list[int]]()
    for _ in range(operations):
        if rng.random() < 0.1 or not texts:
            fresh = rng.choice(12, int(rng.integers(1, 4)), replace=False).tolist()
            seeds = [_seed(rng, row) for row in fresh if rng.random() < 0.9]
            texts.update({row: [] for row in fresh})
            drafter.begin(batch(fresh, seeds))
        rows = rng.permutation(list(texts))[: int(rng.integers(1, len(texts) + 1))].tolist()
        what = ran(*((row, _goes_on(rng, texts[row])) for row in rows))
        way = rng.random()
        if way < 0.5:
            drafter.hear(what)
            continue
        if way < 0.9:
            aim = Aim(int(rng.integers(1, most + 1)), float(rng.random()) ** 2, float(rng.random() * len(rows)))
            found = drafter.draft(what, aim)
        else:
            drafter.hear(what)
            found = drafter.guess(what.rows, int(rng.integers(1, 2 * most + 2)))
        said.append((found.ids.tolist(), found.lens.tolist()))
    return said


def _seed(rng: np.random.Generator, row: int) -> TextSeed:
    length = int(rng.choice([1, 3, 11, 12, 13, BLOCK, 5 * BLOCK + 3]))
    return TextSeed(row, str(rng.integers(3)), rng.integers(0, 4 + length // 4, length))


def _goes_on(rng: np.random.Generator, text: list[int]) -> list[int]:
    """One to five more tokens: new ones, or its own from before, and sometimes one again and again."""
    count, back = int(rng.integers(1, 6)), int(rng.integers(1, 30))
    for _ in range(count):
        text.append(text[-back] if len(text) >= back and rng.random() < 0.9 else int(rng.integers(20)))
    return text[-count:]


@pytest.mark.parametrize("limit", [0, SMALL, 1 << 22], ids=["two-blocks", "wraps-around", "holds-all"])
def test_compiled_code_drafts_the_very_same(seed: int, limit: int) -> None:
    python, native = SuffixDrafter(limit, 4), compiled(limit, 4)
    expected = play(python, seed, 4, 4000)
    assert play(native, seed, 4, 4000) == expected
    drafts = sum(sum(lens) for _, lens in expected)
    print(f"{drafts} drafts in {len(expected)} answers")
    assert drafts > 500


def test_the_compiled_index_keeps_within_its_bytes() -> None:
    for limit in (0, SMALL, 1 << 22):
        assert compiled(limit, 4).nbytes == SuffixIndex(limit).nbytes, limit


def test_compiled_code_goes_on_with_the_rows_that_run() -> None:
    """It is ready between two steps, of which each goes to one of the two."""
    module, code = HOST.load() if HOST.is_built() else None, HostCode()
    if module is None:
        pytest.skip("no native code here")
    drafter = UpgradingDrafter(code, 1 << 20, 4)
    drafter.begin(batch([3, 4], [TextSeed(3, "a", np.arange(100, 120)), TextSeed(4, "b", np.arange(3))]))
    assert drafts_of(drafter, ran((3, [105, 106]))) == [[107, 108, 109, 110]]
    drafter.hear(ran((3, [107])))
    code.module = module
    assert isinstance(drafter._drafter, SuffixDrafter), "between two steps"
    drafter.begin(batch([], []))
    assert isinstance(drafter._drafter, CompiledSuffixDrafter)
    assert drafts_of(drafter, ran((4, [105, 106]), (3, [108]))) == [[], []], "of another scope, and forgotten"
    assert drafts_of(drafter, ran((3, [9, 106, 107]))) == [[108, 9, 106, 107]], "the end of its text was kept"
