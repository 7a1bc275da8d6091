"""Drafts from what was said before: found where it was, forgotten oldest first, and never told to another scope."""

from __future__ import annotations

import numpy as np
import pytest

from core.speculation import suffix_index
from core.speculation.suffix_index import BLOCK, SuffixIndex, Text

SMALL = 1 << 16


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


def test_a_text_that_lost_its_block_begins_another() -> None:
    """While it waited, a text of another scope took its block again. That one is not to be read with words of this."""
    index = SuffixIndex(0)
    waiting = text_of(index, [1, 2, 3], scope=1)
    other = text_of(index, list(range(100, 100 + 2 * BLOCK)), scope=2)
    index.append(other, 500)
    text_of(index, [500, 501, 502], scope=2)
    for token in range(4, 20):
        index.append(waiting, token)
    assert followed(index, text_of(index, [8, 9], scope=1), 3) == [10, 11, 12]
    assert followed(index, text_of(index, [9, 10], scope=2), 3) == []


def test_what_a_text_lost_does_not_go_on_with_it() -> None:
    """Of four blocks the first was taken again while a text waited: what is there now ends with it."""
    index = SuffixIndex(4 * BLOCK * (4 + 16 * len(suffix_index.ORDERS)))
    waiting, end = text_of(index, [1, 2, 3]), 100 + 4 * BLOCK
    text_of(index, list(range(100, end)))
    index.append(waiting, 4)
    assert followed(index, text_of(index, [end - 4, end - 3]), 5) == [end - 2, end - 1]


def test_hashes_of_short_texts_are_no_hashes_of_longer_ones() -> None:
    assert len(suffix_index._hashes(1, (1,))) == 0
    assert len(suffix_index._hashes(1, (1, 2))) == 1
    assert len(suffix_index._hashes(1, tuple(range(8)))) == 3
