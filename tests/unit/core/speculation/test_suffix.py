"""Drafts from what was said before: found where it was, forgotten oldest first, and never told to another scope."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.batch.spec_plan import Aim, SpecPlan, TextSeed
from core.speculation import suffix_index
from core.speculation.drafter import Ran
from core.speculation.suffix_drafter import SuffixDrafter
from core.speculation.suffix_index import BLOCK, SuffixIndex, Text
from core.types.arrays import Ints

SMALL = 1 << 16
EMPTY: Ints = np.empty(0, np.int64)


def text_of(index: SuffixIndex, ids: list[int], scope: int = -7) -> Text:
    """A text that was written token by token."""
    text = Text(scope)
    for token in ids:
        index.append(text, token)
    return text


def followed(index: SuffixIndex, text: Text, most: int) -> list[int]:
    return index.follow(text, most).ids


def test_what_followed_the_same_words_follows_again() -> None:
    index = SuffixIndex(SMALL)
    text_of(index, list(range(100, 140)))
    assert followed(index, text_of(index, [7, 110, 111]), 4) == [112, 113, 114, 115]
    assert followed(index, text_of(index, [7, 137, 138]), 4) == [139], "as far as it went"
    assert followed(index, text_of(index, [7, 138, 139]), 4) == [], "nothing followed its end"
    assert followed(index, text_of(index, [111, 110]), 4) == []
    assert followed(index, text_of(index, [111]), 4) == [], "a single word tells nothing"


def test_a_text_follows_itself() -> None:
    index = SuffixIndex(SMALL)
    assert followed(index, text_of(index, [1, 2, 3, 4, 5, 1, 2]), 3) == [3, 4, 5]


@pytest.mark.parametrize("filler", [0, BLOCK - 9, BLOCK - 4, BLOCK - 3])
@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_text_that_repeats_itself_is_taken_to_go_on_so(period: int, filler: int) -> None:
    """Also where what repeats stands in two blocks, or the text ends with its block."""
    index, loop = SuffixIndex(1 << 20), list(range(1, period + 1))
    text = text_of(index, [*range(100, 100 + filler), *loop, *loop, *loop])
    assert followed(index, text, 12) == (loop * 12)[:12]
    assert followed(index, text, 1) == loop[:1]


def test_the_end_of_another_text_is_no_period() -> None:
    index = SuffixIndex(SMALL)
    text_of(index, [5, 6, 7, 8])
    assert followed(index, text_of(index, [4, 5, 6]), 9) == [7, 8]


def test_the_longer_match_wins_and_of_equal_ones_the_newest() -> None:
    index = SuffixIndex(SMALL)
    text_of(index, [1, 2, 3, 4, 50, 51])
    text_of(index, [9, 9, 3, 4, 60, 61])
    assert followed(index, text_of(index, [1, 2, 3, 4]), 2) == [50, 51]
    text_of(index, [9, 8, 3, 4, 70, 71])
    assert followed(index, text_of(index, [6, 6, 3, 4]), 2) == [70, 71]


@pytest.mark.parametrize("before", [0, 1, 3, 8, BLOCK - 1, BLOCK, 2 * BLOCK + 9])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_written_at_once_is_as_written_word_by_word(before: int, length: int) -> None:
    """A text that goes on, too: behind `before` words."""
    ids = np.random.default_rng(length).integers(0, 50, before + length)
    # Large enough that no entry replaces another.
    one, other = SuffixIndex(1 << 23), SuffixIndex(1 << 23)
    slow, quick = text_of(one, ids.tolist()), text_of(other, ids[:before].tolist())
    other.write(quick, ids[before:])
    assert slow == quick
    for index in (one, other):
        text_of(index, [int(ids[-1]), 1])
    for column in ("_tokens", "_keys", "_places", "_next", "_scopes"):
        assert getattr(one, column) == getattr(other, column), column


def test_a_text_goes_on_across_blocks() -> None:
    index, ids = SuffixIndex(1 << 20), list(range(1000, 1000 + 3 * BLOCK))
    first, second = Text(-7), Text(-7)
    for token in ids:
        # Two texts take turns, so that their blocks do too.
        index.append(first, token)
        index.append(second, token + 5000)
    for start in (BLOCK - 3, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 2):
        asked = text_of(index, ids[start : start + 2])
        assert followed(index, asked, 8) == ids[start + 2 : start + 10], start


@pytest.mark.parametrize("filler", [0, 1, 2])
def test_a_text_goes_on_in_the_first_block_again(filler: int) -> None:
    """Texts of two blocks, each with a question of one behind it: with some filler, one begins in the last block."""
    index = SuffixIndex(SMALL)
    text_of(index, [9] * filler * BLOCK)
    for number in range(40):
        ids = list(range(1000 * number, 1000 * number + 2 * BLOCK))
        index.write(Text(-7), np.array(ids))
        asked = text_of(index, ids[BLOCK - 4 : BLOCK - 2])
        assert followed(index, asked, 8) == ids[BLOCK - 2 : BLOCK + 6], number


def test_a_block_that_is_taken_again_goes_on_nowhere() -> None:
    """Of two blocks the first led to the second; its new text ends with it."""
    index = SuffixIndex(0)
    text_of(index, list(range(100, 100 + 2 * BLOCK)))
    text_of(index, list(range(500, 500 + BLOCK)))
    end = 500 + BLOCK
    assert followed(index, text_of(index, [end - 4, end - 3]), 5) == [end - 2, end - 1]


def test_no_scope_hears_of_another() -> None:
    index = SuffixIndex(SMALL)
    text_of(index, list(range(100, 140)), scope=1)
    assert followed(index, text_of(index, [110, 111], scope=2), 4) == []
    assert followed(index, text_of(index, [110, 111], scope=1), 4) == [112, 113, 114, 115]


@pytest.mark.parametrize("at_once", [True, False])
def test_what_another_scope_says_takes_nothing_away(at_once: bool) -> None:
    """Else a tenant could tell from its own speed that another one said the same."""
    index = SuffixIndex(1 << 20)
    text_of(index, list(range(100, 140)), scope=1)
    if at_once:
        index.write(Text(2), np.arange(100, 140))
    else:
        text_of(index, list(range(100, 140)), scope=2)
    assert followed(index, text_of(index, [110, 111], scope=1), 4) == [112, 113, 114, 115]


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
        drafts = followed(index, text, 5)
        found += bool(drafts)
        if drafts:
            assert any(_holds(each, drafts) for each in said[scope]) or _repeats(ids.tolist(), drafts), drafts
    assert found > 50 and index.nbytes == before


def _holds(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text)))


def _repeats(text: list[int], drafts: list[int]) -> bool:
    """Whether `drafts` are the last so many tokens of `text`, again and again."""
    return any((text[-period:] * len(drafts))[: len(drafts)] == drafts for period in range(1, len(drafts) + 1))


def test_hashes_of_short_texts_are_no_hashes_of_longer_ones() -> None:
    assert len(suffix_index._hashes(1, (1,))) == 0
    assert len(suffix_index._hashes(1, (1, 2))) == 1
    assert len(suffix_index._hashes(1, tuple(range(8)))) == 3


def batch(fresh: list[int], seeds: list[TextSeed]) -> Any:
    spec = SpecPlan(EMPTY, EMPTY, Aim(4), tuple(seeds))
    return SimpleNamespace(fresh_rows=np.array(fresh, np.int64), spec=spec)


def ran(*rows: tuple[int, list[int]]) -> Ran:
    """Rows with the tokens that each got."""
    tokens = [token for _, got in rows for token in got]
    counts, lens = np.array([len(got) for _, got in rows]), np.zeros(len(rows), np.int64)
    return Ran(np.array([row for row, _ in rows]), lens, counts, np.array(tokens, np.int64))


def drafts_of(drafter: SuffixDrafter, what: Ran, most: int = 4, worth: float = 0.0) -> list[list[int]]:
    if most == 0:
        drafter.hear(what)
        return [[]] * len(what.rows)
    found = drafter.draft(what, Aim(most, worth))
    return [ids[:count] for ids, count in zip(found.ids.tolist(), found.lens.tolist(), strict=True)]


def test_rows_draft_from_prompts_and_from_each_other() -> None:
    drafter = SuffixDrafter(SMALL, 4)
    prompt = np.arange(100, 120)
    drafter.begin(batch([3, 5], [TextSeed(3, "a", prompt), TextSeed(5, "a", prompt[:1] - 50)]))
    assert drafts_of(drafter, ran((3, [105, 106]), (5, [107, 108]))) == [[107, 108, 109, 110], [109, 110, 111, 112]]


def test_a_row_without_a_seed_gets_no_drafts_and_shifts_no_other() -> None:
    drafter = SuffixDrafter(SMALL, 4)
    drafter.begin(batch([3, 5], [TextSeed(5, "a", np.arange(100, 120))]))
    assert drafts_of(drafter, ran((3, [1, 2, 3]), (5, [105, 106]))) == [[], [107, 108, 109, 110]]


def test_a_new_owner_goes_on_with_its_own_text() -> None:
    drafter = SuffixDrafter(SMALL, 4)
    drafter.begin(batch([3], [TextSeed(3, "a", np.arange(100, 120))]))
    drafts_of(drafter, ran((3, [105])))
    drafter.begin(batch([3], [TextSeed(3, "b", np.array([1, 105]))]))
    assert drafts_of(drafter, ran((3, [106]))) == [[]], "of another scope"


def test_tokens_are_noted_where_no_drafts_are_wanted() -> None:
    drafter = SuffixDrafter(SMALL, 4)
    drafter.begin(batch([3], [TextSeed(3, "a", np.arange(100, 120))]))
    assert drafts_of(drafter, ran((3, [1, 2, 3, 4])), most=0) == [[]]
    assert drafts_of(drafter, ran((3, [9, 1, 2]))) == [[3, 4, 9, 1]]


def test_a_new_owner_that_does_not_speculate_has_no_text() -> None:
    drafter = SuffixDrafter(SMALL, 4)
    drafter.begin(batch([3], [TextSeed(3, "a", np.arange(100, 120))]))
    drafter.begin(batch([3], []))
    assert drafts_of(drafter, ran((3, [105, 106]))) == [[]]


def test_what_was_wrong_before_is_not_proposed_until_it_is_right_again() -> None:
    """Drafts by two tokens are always wrong at their second place, then right; those by eight are right."""
    drafter = SuffixDrafter(1 << 20, 4)
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


def test_drafts_that_together_bring_less_than_verifying_costs_are_left_out() -> None:
    """Two rows have three drafts each, of which 0.8 + 0.64 + 0.51 are expected to be right; a third row has none."""
    seeds = [TextSeed(row, "a", np.arange(100 * row, 100 * row + 3)) for row in (1, 2, 3)]
    for least, proposed in ((3.9, 3), (4.0, 0)):
        drafter = SuffixDrafter(1 << 20, 4)
        drafter.begin(batch([1, 2, 3], seeds))
        found = drafter.draft(ran((1, [200, 201]), (2, [100, 101]), (3, [7])), Aim(4, least=least))
        assert found.lens.tolist() == [proposed, proposed, 0], "of both rows or of none"


@pytest.mark.parametrize("tokens", [1, 5, BLOCK - 1, BLOCK, 3 * BLOCK])
def test_what_was_heard_while_no_drafts_were_wanted_is_noted_all_the_same(tokens: int) -> None:
    drafter, said = SuffixDrafter(1 << 20, 4), list(range(1000, 1000 + tokens + 6))
    drafter.begin(batch([1, 2], [TextSeed(1, "a", np.arange(3)), TextSeed(2, "a", np.arange(5))]))
    for token in said:
        drafts_of(drafter, ran((1, [token])), most=0)
    # The row is given away before its text was asked for.
    drafter.begin(batch([1], []))
    assert drafts_of(drafter, ran((2, said[tokens : tokens + 2]))) == [said[tokens + 2 :]]


def test_rows_that_were_heard_together_keep_their_own_texts() -> None:
    drafter = SuffixDrafter(1 << 20, 4)
    drafter.begin(batch([1, 2], [TextSeed(1, "a", np.arange(3)), TextSeed(2, "a", np.arange(5))]))
    for step in range(20):
        drafts_of(drafter, ran((1, [100 + 2 * step, 101 + 2 * step]), (2, [500 + step])), most=0)
    found = drafts_of(drafter, ran((1, [505, 506]), (2, [107, 108])))
    assert found == [[507, 508, 509, 510], [109, 110, 111, 112]]
