"""Options by row while the host knows only bounds of where a row stands: the device picks what counts there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core.device.staging import Staging
from core.sampling.penalties import apply_bias
from core.sampling.places import Places
from core.scheduler.sampling_table import FORCE, SamplingTable
from core.types.request import Req
from core.types.sampling_params import SamplingParams

CPU = torch.device("cpu")
EOS, STOP, LIKED, VOCAB = 2, 7, 5, 12
PROMPT, MOST = 3, 6
NONE = -np.inf


def table_with(params: SamplingParams, **wishes: Any) -> SamplingTable:
    table = SamplingTable(3, VOCAB, (EOS,))
    req = Req("r", 0, np.arange(PROMPT), seed=0, max_new_tokens=MOST, params=params, **wishes)
    req.row = 1
    table.fill(req)
    return table


def added(table: SamplingTable, lower: int, upper: int, length: int) -> dict[int, float]:
    """What is added to the logits of a token behind `length` others, where the plan knew only the bounds."""
    batch = table.batch(np.array([2, 1]), np.array([0, lower]), np.array([0, upper]))
    logits = torch.zeros(2, VOCAB)
    apply_bias(logits, batch, torch.tensor([0, length]))
    assert not logits[0].any()
    return {token: value for token, value in enumerate(logits[1].tolist()) if value}


BOTH = SamplingParams(logit_bias={LIKED: 3.0}, min_tokens=2, stop_token_ids=(STOP,))


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 0), (0, 3), (4, 4)])
def test_what_counts_depends_on_where_the_row_stands(before: int, after: int) -> None:
    table = table_with(BOTH, forced_first=(8, 9), forced_last=(EOS,))
    banned = {LIKED: 3.0, EOS: NONE, STOP: NONE}
    free = {LIKED: 3.0}
    expected = [{8: FORCE, 9: FORCE}, banned, free, free, free, {EOS: FORCE}, {}]
    for output, wanted in enumerate(expected):
        length = PROMPT + output
        assert added(table, length - before, length + after, length) == wanted, output


def test_ids_to_be_told_of_are_a_rows_own() -> None:
    table = SamplingTable(4, VOCAB, (EOS,))
    for row, ids in enumerate(((), (STOP, LIKED), (EOS,)), 1):
        params = SamplingParams(logprobs=row != 1, logprob_token_ids=ids)
        req = Req("r", 0, np.arange(PROMPT), seed=0, max_new_tokens=1, params=params)
        req.row = row
        table.fill(req)

    def chosen(*rows: int) -> Any:
        here = np.full(len(rows), PROMPT)
        found = table.batch(np.array(rows), here, here).chosen
        return None if found is None else found.tolist()

    assert chosen(1) is None and chosen(3) == [[EOS]]
    assert chosen(3, 1, 2) == [[EOS, 0], [0, 0], [STOP, LIKED]]
    rows, here = np.array([3, 2]), np.array([PROMPT, PROMPT])
    spread = table.batch(rows, here, here).spread(np.array([2, 1])).chosen
    assert spread is not None and spread.tolist() == [[EOS, 0], [EOS, 0], [STOP, LIKED]]
    req.params = SamplingParams()
    table.fill(req)
    assert chosen(3) is None


def test_an_output_of_one_token_is_forced_as_the_last() -> None:
    table = SamplingTable(2, VOCAB, (EOS,))
    req = Req("r", 0, np.arange(PROMPT), seed=0, max_new_tokens=1, params=BOTH, forced_first=(8,), forced_last=(9,))
    req.row = 1
    table.fill(req)
    batch = table.batch(np.array([1]), np.array([PROMPT]), np.array([PROMPT]))
    assert (batch.bias_tokens.tolist(), batch.bias_values.tolist()) == ([9], [FORCE])


def test_a_step_carries_only_what_may_count() -> None:
    table = table_with(SamplingParams(min_tokens=2), forced_last=(9,))

    def tokens(lower: int, upper: int) -> list[int]:
        batch = table.batch(np.array([1]), np.array([lower]), np.array([upper]))
        assert len(batch.bias_rows) == len(batch.bias_from) == len(batch.bias_until)
        return batch.bias_tokens.tolist()

    assert tokens(PROMPT, PROMPT + 1) == [EOS]
    assert tokens(PROMPT + 1, PROMPT + 3) == [EOS]
    assert tokens(PROMPT + 2, PROMPT + 4) == []
    assert tokens(PROMPT + 4, PROMPT + 5) == [9]
    assert tokens(PROMPT, PROMPT + 5) == [EOS, 9]
    assert tokens(PROMPT + 6, PROMPT + 6) == []


@pytest.mark.parametrize("spread", [0, 1, 5])
def test_each_place_has_its_own_random_number_whatever_the_bounds(spread: int) -> None:
    table = SamplingTable(4, VOCAB, (EOS,))
    for row in (1, 2):
        req = Req(
            str(row), 0, np.arange(PROMPT + row), params=SamplingParams(temperature=1.0), seed=row, max_new_tokens=MOST
        )
        req.row = row
        table.fill(req)
    rows, lens = np.array([2, 1]), np.array([PROMPT + 4, PROMPT + 2])

    def numbers(lower: np.ndarray, upper: np.ndarray) -> list[float]:
        return Places.of(table.batch(rows, lower, upper), torch.from_numpy(lens), Staging(CPU)).uniforms.tolist()

    below, above = np.array([spread, 0]), np.array([0, spread])
    assert numbers(lens - below, lens + above) == numbers(lens, lens)
    assert len({*numbers(lens, lens)}) == 2


def test_a_row_samples_as_its_newest_owner_says() -> None:
    table, rows, lens = table_with(SamplingParams(temperature=0.5)), np.array([1]), np.array([PROMPT])
    for temperature in (0.5, 0.9, 0.0):
        params = SamplingParams(temperature=temperature)
        req = Req("r", 0, np.arange(PROMPT), seed=0, max_new_tokens=MOST, params=params)
        req.row = 1
        table.fill(req)
        # Twice, as in steady decode, which looks the options up once.
        for _ in range(2):
            batch = table.batch(rows, lens, lens)
            assert batch.temperatures.tolist() == [np.float32(temperature)]
            assert batch.all_greedy == (temperature == 0)
    assert table.batch(np.array([2, 1]), np.zeros(2, np.int64), np.zeros(2, np.int64)).prompt_lens.tolist() == [0, 3]
