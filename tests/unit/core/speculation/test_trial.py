"""Which tokens a step computes to verify drafts, and how far each row comes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from core.native.host import HOST
from core.native.kept_library import ExtensionUnavailable
from core.speculation.compiled_trial import CompiledTrial
from core.speculation.drafter import Drafts
from core.speculation.trial import Trial
from core.types.arrays import Ints

VOCAB = 100


@pytest.fixture(params=["python", "compiled"], autouse=True)
def lay_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in compiled code as well."""
    if request.param == "compiled":
        try:
            module = HOST.load()
        except ExtensionUnavailable as reason:
            pytest.skip(str(reason))
        monkeypatch.setattr(Trial, "of", partial(CompiledTrial.laid_out, module))


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def trial(lens: Ints, drafts: list[list[int]], room: Ints | None = None, valid: Ints | None = None) -> Trial:
    """Rows with newest tokens 10, 20, … behind `lens` tokens."""
    width = max(map(len, drafts))
    ids = np.array([[*each, *[-1] * (width - len(each))] for each in drafts], np.int64).reshape(len(drafts), width)
    said = Drafts(ids, np.array([len(each) for each in drafts], np.int64) if valid is None else valid)
    newest = 10 * np.arange(1, len(lens) + 1)
    return Trial.of(newest, lens, said, np.full(len(lens), width) if room is None else room, VOCAB)


def test_each_row_has_its_newest_token_and_its_drafts() -> None:
    found = trial(ints(5, 0, 7), [[11, 12], [], [31]])
    assert found.counts.tolist() == [3, 1, 2] and found.starts.tolist() == [0, 3, 4]
    assert found.ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert found.positions.tolist() == [5, 6, 7, 0, 7, 8]
    assert found.row_of.tolist() == [0, 0, 0, 1, 2, 2]


@pytest.mark.parametrize(("room", "count"), [(-3, 1), (-1, 1), (0, 1), (1, 2), (2, 3), (9, 4)])
def test_no_row_tries_more_than_it_has_room_for(room: int, count: int) -> None:
    assert trial(ints(5), [[11, 12, 13]], room=ints(room)).counts.tolist() == [count]


def test_what_is_valid_is_told_by_the_length_alone() -> None:
    found = trial(ints(5, 6), [[11, 12, 13], [21, 22, 23]], valid=ints(0, 2))
    assert found.ids.tolist() == [10, 20, 21, 22]


@pytest.mark.parametrize("foreign", [-1, VOCAB, 2**40])
def test_drafts_end_before_one_that_is_no_token(foreign: int) -> None:
    found = trial(ints(5, 6, 7), [[11, foreign, 13], [foreign, 22, 23], [0, VOCAB - 1, 33]])
    assert found.ids.tolist() == [10, 11, 20, 30, 0, VOCAB - 1, 33]


def test_a_row_goes_on_behind_the_first_wrong_draft() -> None:
    found = trial(ints(5, 6, 7, 8), [[11, 12, 13], [21, 22, 23], [31, 32, 33], []])
    #           newest, then the place of each draft
    sampled = ints(11, 12, 13, 14, 21, 77, 23, 24, 76, 32, 33, 34, 44)
    verdict = found.judged(sampled)
    assert verdict.counts.tolist() == [4, 2, 1, 1]
    assert verdict.lens.tolist() == [9, 8, 8, 9]
    assert sampled[verdict.kept].tolist() == [11, 12, 13, 14, 21, 77, 76, 44]
    assert sampled[verdict.last].tolist() == [14, 77, 76, 44], "the newest tokens"


def test_a_right_draft_counts_only_where_its_place_may() -> None:
    found = trial(ints(5, 6, 7, 8), [[11, 12, 13], [21, 22, 23], [31, 32, 33], []])
    sampled = ints(11, 12, 13, 14, 21, 77, 23, 24, 31, 32, 33, 34, 44)
    verdict = found.judged(sampled, ints(3, 3, 1, 1))
    assert verdict.counts.tolist() == [3, 2, 1, 1]
    assert sampled[verdict.last].tolist() == [13, 77, 31, 44]
    unbound = ints(*[np.iinfo(np.int64).max] * 4)
    assert found.judged(sampled, unbound).counts.tolist() == found.judged(sampled).counts.tolist() == [4, 2, 4, 1]


def test_a_token_of_the_next_row_is_no_draft_of_this_one() -> None:
    """What is sampled behind the last draft of a row may well be the newest token of the next row."""
    found = trial(ints(5, 6), [[11], [21]])
    assert found.judged(ints(11, 20, 21, 3)).counts.tolist() == [2, 2]
    assert found.judged(ints(9, 20, 20, 3)).counts.tolist() == [1, 1]


def test_it_is_as_a_loop_over_rows_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        rows = int(rng.integers(1, 6))
        drafts = [rng.integers(-1, 4, 4).tolist() for _ in range(rows)]
        room, lens = rng.integers(-1, 6, rows), rng.integers(0, 50, rows)
        found = trial(lens, drafts, room, valid := rng.integers(0, 5, rows))
        most = rng.integers(1, 7, rows)
        sampled = rng.integers(0, 4, len(found.ids))
        counts, place = [], 0
        for row in range(rows):
            tried = drafts[row][: max(0, min(int(room[row]), int(valid[row])))]
            tried = tried[: tried.index(-1)] if -1 in tried else tried
            count = 1
            for i, draft in enumerate(tried):
                if sampled[place + i] != draft or count == most[row]:
                    break
                count += 1
            counts.append(count)
            place += len(tried) + 1
        assert place == len(found.ids) and found.judged(sampled, most).counts.tolist() == counts
