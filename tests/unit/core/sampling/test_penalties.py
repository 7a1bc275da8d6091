"""The device-side token history, and penalties counted from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.sampling.penalties import TokenHistory, apply_penalties
from tests.unit.core.sampling.batches import Row, batch_of, history_of, places_of


def _expected(row: Row) -> torch.Tensor:
    """The definition, one token at a time."""
    logits = row.logits.clone()
    for token in set(row.prompt + row.output):
        value = logits[token]
        value = value / row.repetition if value > 0 else value * row.repetition
        count = row.output.count(token)
        logits[token] = value - row.frequency * count - row.presence * (count > 0)
    return logits


def _penalised(rows: list[Row], history: TokenHistory | None = None) -> torch.Tensor:
    logits = torch.stack([row.logits for row in rows])
    apply_penalties(logits, batch_of(rows), places_of(rows).lens, history or history_of(rows, max_len=64))
    return logits


def test_against_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        Row(
            torch.from_numpy(rng.normal(0, 3, 50)).float(),
            repetition=float(rng.choice([1.0, 1.5, 0.5])),
            frequency=float(rng.choice([0.0, 0.25, -2.0])),
            presence=float(rng.choice([0.0, 0.5, -1.0])),
            prompt=tuple(rng.integers(0, 50, rng.integers(1, 20)).tolist()),
            output=tuple(rng.integers(0, 50, rng.integers(0, 40)).tolist()),
        )
        for _ in range(40)
    ]
    torch.testing.assert_close(_penalised(rows), torch.stack([_expected(row) for row in rows]), rtol=0, atol=1e-6)


def test_rows_without_penalties_keep_their_bits() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0))
    rows = [Row(logits, prompt=(1, 2)), Row(logits, prompt=(1, 2), repetition=3.0), Row(logits, prompt=(5,))]
    found = _penalised(rows)
    assert torch.equal(found[0], logits) and torch.equal(found[2], logits)
    assert not torch.equal(found[1], logits)


def test_prompt_tokens_do_not_count_as_output() -> None:
    logits = torch.zeros(8)
    found = _penalised([Row(logits, prompt=(1, 1, 2), output=(2, 3, 3), frequency=0.5, presence=0.25)])
    assert found[0].tolist() == [0, 0, -0.75, -1.25, 0, 0, 0, 0]


def test_appended_tokens_count_in_the_next_step() -> None:
    """What overlap does: the step's token is appended on the device and read there, never by the host."""
    row = Row(torch.ones(6), prompt=(0, 1), output=(), frequency=1.0)
    history = history_of([row], max_len=8)
    for position, token in ((2, 4), (3, 4), (4, 5)):
        history.append(torch.tensor([1]), torch.tensor([position]), torch.tensor([token]))
    grown = Row(row.logits, prompt=row.prompt, output=(4, 4, 5), frequency=1.0)
    assert _penalised([grown], history)[0].tolist() == [1, 1, 1, 1, -1, 0]


def test_leftovers_of_an_earlier_owner_do_not_count() -> None:
    """They are read beside a longer row: as many columns as that one has."""
    history = TokenHistory(torch.full((4, 16), 3, dtype=torch.int32))
    history.seed([2, 3], [np.array([1], np.int64), np.array([0, 0, 4, 4])])
    short = Row(torch.ones(5), prompt=(1,), repetition=2.0, presence=1.0)
    longer = Row(torch.ones(5), prompt=(0, 0), output=(4, 4), repetition=2.0, presence=1.0)
    logits = torch.ones(3, 5)
    rows = [Row(torch.ones(5)), short, longer]
    apply_penalties(logits, batch_of(rows), places_of(rows).lens, history)
    assert logits.tolist() == [[1, 1, 1, 1, 1], [1, 0.5, 1, 1, 1], [0.5, 1, 1, 1, -0.5]]


def test_seed_overwrites_a_reused_row() -> None:
    history = TokenHistory(torch.zeros(4, 6, dtype=torch.int32))
    history.seed([3, 1], [np.array([5, 6, 7]), np.array([8])])
    history.seed([3], [np.array([9, 9])])
    assert history.buffer.tolist() == [[0] * 6, [8, 0, 0, 0, 0, 0], [0] * 6, [9, 9, 7, 0, 0, 0]]
    history.seed([], [])
    history.seed([2], [np.empty(0, np.int64)])


def test_append_past_the_end_lands_in_the_padding_row() -> None:
    """The extra step of a request that filled its context must not touch anyone's tokens."""
    history = TokenHistory(torch.zeros(3, 4, dtype=torch.int32))
    history.append(torch.tensor([1, 2]), torch.tensor([4, 3]), torch.tensor([7, 8]))
    assert history.buffer[1:].tolist() == [[0, 0, 0, 0], [0, 0, 0, 8]]


@pytest.mark.parametrize(("rows", "length"), [([0], 2), ([3], 2), ([1], 5)])
def test_seed_refuses_padding_foreign_rows_and_overflow(rows: list[int], length: int) -> None:
    history = TokenHistory(torch.zeros(3, 4, dtype=torch.int32))
    with pytest.raises(AssertionError):
        history.seed(rows, [np.zeros(length, np.int64)])


def test_buffer_must_be_int32_rows() -> None:
    with pytest.raises(AssertionError):
        TokenHistory(torch.zeros(3, 4, dtype=torch.int64))
