"""Drafts from what was said before: found where it was, forgotten oldest first, and never told to another scope."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.batch.spec_plan import SpecPlan, TextSeed
from core.speculation import suffix_index
from core.speculation.drafter import Ran
from core.speculation.suffix_drafter import SuffixDrafter
from core.speculation.suffix_index import BLOCK, SuffixIndex, Text
from core.types.arrays import Ints

SMALL = 1 << 16
NO_DRAFTS: Ints = np.empty(0, np.int64)


def text_of(index: SuffixIndex, ids: list[int], scope: int = 1) -> Text:
    """A text that was written token by token."""
    text = Text(scope)
    for token in ids:
        index.append(text, token)
    return text


def test_what_followed_the_same_words_follows_again() -> None:
    index = SuffixIndex(SMALL)
    text_of(index, list(range(100, 140)))
    assert index.follow(text_of(index, [7, 110, 111]), 4) == [112, 113, 114, 115]
    assert index.follow(text_of(index, [7, 137, 138]), 4) == [139], "as far as it went"
    assert index.follow(text_of(index, [7, 138, 139]), 4) == [], "nothing followed its end"
    assert index.follow(text_of(index, [111, 110]), 4) == []
    assert index.follow(text_of(index, [111]), 4) == [], "a single word tells nothing"


def test_a_text_follows_itself() -> None:
    index = SuffixIndex(SMALL)
    assert index.follow(text_of(index, [1, 2, 3, 4, 5, 1, 2]), 3) == [3, 4, 5]


def test_the_longer_match_wins_and_of_equal_ones_the_newest() -> None:
    index = SuffixIndex(SMALL)
    text_of(index, [1, 2, 3, 4, 50, 51])
    text_of(index, [9, 9, 3, 4, 60, 61])
    assert index.follow(text_of(index, [1, 2, 3, 4]), 2) == [50, 51]
    text_of(index, [9, 8, 3, 4, 70, 71])
    assert index.follow(text_of(index, [6, 6, 3, 4]), 2) == [70, 71]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_written_at_once_is_as_written_word_by_word(length: int) -> None:
    ids = np.random.default_rng(length).integers(0, 50, length)
    # Large enough that no entry replaces another.
    one, other = SuffixIndex(1 << 23), SuffixIndex(1 << 23)
    slow, quick = text_of(one, ids.tolist()), Text(1)
    other.write(quick, ids)
    assert slow == quick
    for index in (one, other):
        text_of(index, [int(ids[-1]), 1])
    for column in ("_tokens", "_keys", "_places", "_next", "_scopes"):
        assert getattr(one, column) == getattr(other, column), column


def test_a_text_goes_on_across_blocks() -> None:
    index, ids = SuffixIndex(1 << 20), list(range(1000, 1000 + 3 * BLOCK))
    first, second = Text(1), Text(1)
    for token in ids:
        # Two texts take turns, so that their blocks do too.
        index.append(first, token)
        index.append(second, token + 5000)
    for start in (BLOCK - 3, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 2):
        asked = text_of(index, ids[start : start + 2])
        assert index.follow(asked, 8) == ids[start + 2 : start + 10], start


@pytest.mark.parametrize("filler", [0, 1, 2])
def test_a_text_goes_on_in_the_first_block_again(filler: int) -> None:
    """Texts of two blocks, each with a question of one behind it: with some filler, one begins in the last block."""
    index = SuffixIndex(SMALL)
    text_of(index, [9] * filler * BLOCK)
    for number in range(40):
        ids = list(range(1000 * number, 1000 * number + 2 * BLOCK))
        index.write(Text(1), np.array(ids))
        asked = text_of(index, ids[BLOCK - 4 : BLOCK - 2])
        assert index.follow(asked, 8) == ids[BLOCK - 2 : BLOCK + 6], number


def test_no_scope_hears_of_another() -> None:
    index = SuffixIndex(SMALL)
    text_of(index, list(range(100, 140)), scope=1)
    assert index.follow(text_of(index, [110, 111], scope=2), 4) == []
    assert index.follow(text_of(index, [110, 111], scope=1), 4) == [112, 113, 114, 115]


def test_memory_is_fixed_and_the_oldest_is_forgotten(seed: int) -> None:
    """Far more text than fits, in several scopes: what is found was always said in its own scope."""
    rng, index = np.random.default_rng(seed), SuffixIndex(SMALL)
    before, said = index.nbytes, dict[int, list[list[int]]]()
    assert before <= 2 * SMALL
    found = 0
    for _ in range(300):
        scope, ids = int(rng.integers(4)), rng.integers(0, 12, int(rng.integers(1, 200)))
        text = Text(scope)
        index.write(text, ids)
        said.setdefault(scope, []).append(ids.tolist())
        drafts = index.follow(text, 5)
        found += bool(drafts)
        if drafts:
            assert any(_holds(each, drafts) for each in said[scope]), drafts
    assert found > 50 and index.nbytes == before


def _holds(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text)))


def test_hashes_of_short_texts_are_no_hashes_of_longer_ones() -> None:
    assert len(suffix_index._hashes((1,))) == 0
    assert len(suffix_index._hashes((1, 2))) == 1
    assert len(suffix_index._hashes(tuple(range(8)))) == 3


def batch(fresh: list[int], seeds: list[TextSeed]) -> Any:
    spec = SpecPlan(NO_DRAFTS, NO_DRAFTS, 4, tuple(seeds))
    return SimpleNamespace(fresh_rows=np.array(fresh, np.int64), spec=spec)


def ran(*rows: tuple[int, list[int]]) -> Ran:
    """Rows with the tokens that each got."""
    tokens = [token for _, got in rows for token in got]
    counts, lens = np.array([len(got) for _, got in rows]), np.zeros(len(rows), np.int64)
    return Ran(np.array([row for row, _ in rows]), lens, counts, np.array(tokens, np.int64))


def drafts_of(drafter: SuffixDrafter, what: Ran, most: int = 4) -> list[list[int]]:
    found = drafter.draft(what, most)
    return [ids[:count] for ids, count in zip(found.ids.tolist(), found.lens.tolist(), strict=True)]


def test_rows_draft_from_prompts_and_from_each_other() -> None:
    drafter = SuffixDrafter(SMALL)
    prompt = np.arange(100, 120)
    drafter.begin(batch([3, 5], [TextSeed(3, "a", prompt), TextSeed(5, "a", prompt[:1] - 50)]))
    assert drafts_of(drafter, ran((3, [105, 106]), (5, [107, 108]))) == [[107, 108, 109, 110], [109, 110, 111, 112]]


def test_a_row_without_a_seed_gets_no_drafts_and_shifts_no_other() -> None:
    drafter = SuffixDrafter(SMALL)
    drafter.begin(batch([3, 5], [TextSeed(5, "a", np.arange(100, 120))]))
    assert drafts_of(drafter, ran((3, [1, 2, 3]), (5, [105, 106]))) == [[], [107, 108, 109, 110]]


def test_a_new_owner_goes_on_with_its_own_text() -> None:
    drafter = SuffixDrafter(SMALL)
    drafter.begin(batch([3], [TextSeed(3, "a", np.arange(100, 120))]))
    drafts_of(drafter, ran((3, [105])))
    drafter.begin(batch([3], [TextSeed(3, "b", np.array([1, 105]))]))
    assert drafts_of(drafter, ran((3, [106]))) == [[]], "of another scope"


def test_tokens_are_noted_where_no_drafts_are_wanted() -> None:
    drafter = SuffixDrafter(SMALL)
    drafter.begin(batch([3], [TextSeed(3, "a", np.arange(100, 120))]))
    assert drafts_of(drafter, ran((3, [1, 2, 3, 4])), most=0) == [[]]
    assert drafts_of(drafter, ran((3, [9, 1, 2]))) == [[3, 4, 9, 1]]


def test_a_new_owner_that_does_not_speculate_has_no_text() -> None:
    drafter = SuffixDrafter(SMALL)
    drafter.begin(batch([3], [TextSeed(3, "a", np.arange(100, 120))]))
    drafter.begin(batch([3], []))
    assert drafts_of(drafter, ran((3, [105, 106]))) == [[]]
