"""Sampling that runs out of memory, at every allocation in turn, gives the tokens that it gives with enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.grammar_batch import TokenMask
from core.batch.sampling_batch import SamplingBatch
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory, shortage
from core.sampling.sampler import SampleOutput, Sampler, Scored
from core.sampling.splitting import Piece, Pieces, rows_of_mask, sample_in_pieces
from tests.support.fakes.tight_allocator import ERRORS, TightAllocator
from tests.unit.core.sampling.batches import CPU, Row, batch_of, history_of, places_of

VOCAB = 300
MOST_TRIED = 40
"""Of the allocations of one run; an accelerator's are hundreds, which take their time."""
TOKENS, ALTERNATIVES = 2, 4
"""Buffers of the output, which are the first allocations: tokens and flags, then the columns of log probabilities."""
WANTED = np.array([-1, 0, 4, 2, -1, 1, 3])
"""Alternatives of seven rows, -1 for no log probability."""
FIELDS = ("tokens", "non_finite", "logprobs", "top_ids", "top_values", "chosen")
CHOSEN = np.arange(14).reshape(7, 2) * 7
"""Ids of which all rows are told."""


def rows(*, all_random: bool) -> list[Row]:
    """Every option once; with `all_random` no row is greedy, so that logits are divided where they stand."""
    rng = np.random.default_rng(5)
    least = 0.7 if all_random else 0.0
    options: tuple[dict[str, Any], ...] = (
        {"temperature": least},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9, "bias": ((7, 5.0), (9, -5.0))},
        {"temperature": least, "repetition": 1.5, "frequency": 0.7, "presence": 0.4, "bias": ((3, 2.0),)},
        {"temperature": 0.9, "min_p": 0.05, "frequency": 1.1, "output": (1, 2, 3, 2)},
        {"temperature": 2.0},
        {"temperature": 0.6, "top_k": 5, "presence": 2.0, "output": (8, 8)},
    )
    made = []
    for place, option in enumerate(options):
        logits = torch.from_numpy(rng.normal(size=VOCAB).astype(np.float32) * 3)
        common: dict[str, Any] = {"uniform": 0.1 + 0.11 * place, "prompt": (1, 2, 3 + place), "output": (5,)}
        made.append(Row(logits, **common | option))
    # A penalty of 2 leaves this token on top, and the same penalty twice does not.
    made[-1].logits[8] = made[-1].logits.max() + 3
    return made


class Case:
    """One batch, with its mask, as often as wanted from the beginning."""

    def __init__(self, *, all_random: bool, accelerator: bool, logprobs: bool) -> None:
        self.rows = rows(all_random=all_random)
        told = {"top_logprobs": 4, "chosen": CHOSEN} if logprobs else {}
        self.batch: SamplingBatch = batch_of(self.rows, logprobs=logprobs, **told)
        self.history = history_of(self.rows)
        self.places = places_of(self.rows)
        self.sampler = Sampler(VOCAB, CPU)
        if accelerator:
            # The accelerator's kernels, on this machine's memory.
            self.sampler.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        words = np.random.default_rng(3).integers(-(2**31), 2**31, (2, 10)).astype(np.int32)
        words[:, VOCAB // 32 + 1 :] = 0
        self.mask = TokenMask(np.array([1, 5]), words)

    def logits(self) -> torch.Tensor:
        return torch.stack([row.logits for row in self.rows])

    def whole(self) -> SampleOutput:
        return self.sampler.sample(self.logits(), self.batch, self.places, self.history, self.mask)

    def pieces(self, refuses: Callable[[int], bool], error: Callable[[], Exception] = ERRORS[0]) -> Pieces:
        scored = Scored(self.logits(), self.places)
        with TightAllocator(refuses, error):
            return sample_in_pieces(self.sampler, scored, self.batch, self.history, self.mask)


def various() -> Case:
    """A case whose rows ask for `WANTED`."""
    case = Case(all_random=True, accelerator=False, logprobs=True)
    case.batch = dataclasses.replace(case.batch, alternatives=WANTED)
    return case


def survived(refuses: Callable[[int], bool], error: Callable[[], Exception] = ERRORS[0]) -> Pieces:
    """The pieces of `various`; memory that is short must not come out of them."""
    try:
        return various().pieces(refuses, error)
    except MEMORY_ERRORS as short:
        raise AssertionError("a shortage that pieces can do with ended the step") from short


def assert_served(got: Pieces, wanted: SampleOutput) -> list[int]:
    """Rows that were not given up have what they asked for, as in `wanted`; returns their places."""
    output, given_up = got.output, got.given_up.tolist()
    assert given_up == sorted(set(given_up)) and not output.tokens[given_up].any()
    served = [place for place in range(len(WANTED)) if place not in given_up]
    assert torch.equal(output.tokens[served], wanted.tokens[served])
    assert torch.equal(output.non_finite[served], wanted.non_finite[served])
    for place in served:
        count = int(WANTED[place])
        if count >= 0:
            assert output.chosen is not None and wanted.chosen is not None
            assert torch.equal(output.chosen[place], wanted.chosen[place]), place
        for name in FIELDS[2:5] if count > 0 else FIELDS[2:3] if count == 0 else ():
            mine, theirs = getattr(output, name)[place], getattr(wanted, name)[place]
            assert torch.equal(mine[:count], theirs[:count]) if mine.ndim else mine == theirs, (place, name)
    return served


def assert_same(got: SampleOutput, wanted: SampleOutput, places: list[int] | None = None) -> None:
    for name in FIELDS:
        mine, theirs = getattr(got, name), getattr(wanted, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert torch.equal(*(each if places is None else each[places] for each in (mine, theirs))), name


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("accelerator", [True, False])
@pytest.mark.parametrize("all_random", [True, False])
def test_every_allocation_may_fail(all_random: bool, accelerator: bool, logprobs: bool) -> None:
    case = Case(all_random=all_random, accelerator=accelerator, logprobs=logprobs)
    wanted, sizes = case.whole(), list[int]()

    def counts(size: int) -> bool:
        sizes.append(size)
        return False

    case.pieces(counts)
    first = TOKENS + (ALTERNATIVES if logprobs else 0)
    # A bisection allocates in each of its passes, and one of them is like another.
    for at in range(first, len(sizes), max(1, len(sizes) // (MOST_TRIED // (10 if accelerator else 1)))):
        left = iter([False] * at + [True])
        got = case.pieces(lambda _, left=left: next(left, False))
        assert len(got.given_up) == 0 and next(left, None) is None, at
        assert_same(got.output, wanted)
    assert len(sizes) > 20, "there was something to fail"


@pytest.mark.parametrize("error", ERRORS)
def test_rows_are_halved_until_they_fit(error: Callable[[], Exception]) -> None:
    case = Case(all_random=True, accelerator=False, logprobs=True)
    sizes: list[int] = []

    def refuses(size: int) -> bool:
        sizes.append(size)
        return size > 2 * 8 * 384  # two rows of float64, padded

    got = case.pieces(refuses, error)
    assert len(got.given_up) == 0 and any(size > 2 * 8 * 384 for size in sizes)
    assert_same(got.output, case.whole())


def test_a_row_that_does_not_fit_alone_is_given_up_alone() -> None:
    """Alternatives need an integer of 8 bytes per token, which is more than the greedy rows beside it need."""
    made = [Row(row.logits, temperature=0.0, repetition=row.repetition) for row in rows(all_random=False)]
    case = Case(all_random=False, accelerator=False, logprobs=True)
    case.rows, case.history = made, history_of(made)
    batch = batch_of(made, logprobs=True, top_logprobs=4)
    alternatives = np.array([-1, -1, 4, -1, 0, -1, -1])
    case.batch = dataclasses.replace(batch, alternatives=alternatives)
    got, wanted = case.pieces(lambda size: size > 6 * VOCAB), case.whole()
    assert got.given_up.tolist() == [2] and got.output.tokens[2] == 0
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(got.output.tokens[others], wanted.tokens[others])
    assert got.output.logprobs is not None and wanted.logprobs is not None and got.output.top_ids is not None
    assert got.output.logprobs[4] == wanted.logprobs[4] and got.output.top_ids.shape == (7, 4)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6])
def test_any_allocations_may_fail_but_those_of_the_tokens(rate: float) -> None:
    wanted, rng = various().whole(), np.random.default_rng(int(rate * 100))
    given_up = 0
    for _ in range(100):
        asked: list[int] = []

        def refuses(size: int, asked: list[int] = asked) -> bool:
            asked.append(size)
            return len(asked) > TOKENS and rng.random() < rate

        given_up += len(WANTED) - len(assert_served(survived(refuses), wanted))
    assert given_up > 10


@pytest.mark.parametrize("error", ERRORS)
def test_a_row_that_is_given_up_needs_no_memory(error: Callable[[], Exception]) -> None:
    asked: list[int] = []

    def refuses(size: int) -> bool:
        asked.append(size)
        return len(asked) > TOKENS

    got = survived(refuses, error)
    assert got.given_up.tolist() == list(range(7)) and not got.output.tokens.any()
    assert got.output.logprobs is None and got.output.top_ids is None


@pytest.mark.parametrize("error", ERRORS)
def test_without_memory_for_the_tokens_nothing_is_sampled(error: Callable[[], Exception]) -> None:
    with pytest.raises(type(error()), match="llocate"):
        various().pieces(lambda size: size == 7 * 8, error)


@pytest.mark.parametrize(
    ("refused", "given_up"),
    [
        ({4}, [2]),
        ({5}, [2]),
        ({4, 6}, [2, 6]),
        ({4, 6, 8, 10}, [2, 3, 5, 6]),
        ({3, 4, 5, 6, 7}, [1, 2, 3, 5, 6]),
    ],
)
def test_rows_that_want_most_go_first_where_their_wishes_do_not_fit(refused: set[int], given_up: list[int]) -> None:
    """`refused`: which allocations, from 1. The first two are the tokens'; then three for each width that is tried."""
    asked: list[int] = []

    def refuses(size: int) -> bool:
        asked.append(size)
        return len(asked) in refused

    got = survived(refuses)
    assert got.given_up.tolist() == given_up
    assert len(assert_served(got, various().whole())) == 7 - len(given_up)


def test_a_part_pays_for_its_own_log_probabilities() -> None:
    """What was computed for all rows before memory ran out is not carried on for rows that did not ask for it."""
    case = various()
    whole = Piece(0, case.sampler.score(case.logits(), case.batch, case.places, case.history), case.batch, case.mask)
    assert whole.scored.top_ids is not None
    # As another sampler has them, which keeps no log probabilities of all tokens.
    whole.scored.top_values = whole.scored.top_ids.float()
    for place, count in enumerate(WANTED.tolist()):
        scored = whole.part(place, place + 1).scored
        assert (scored.raw is None) == (count < 0), place
        for held in (scored.top_ids, scored.top_values):
            assert (0 if held is None else held.shape[1]) == max(count, 0), place


def test_the_masks_of_a_part_are_no_copies() -> None:
    mask = various().mask
    for first, last, places in ((0, 7, [1, 5]), (1, 5, [0]), (5, 6, [0]), (2, 5, []), (6, 7, [])):
        part = rows_of_mask(mask, first, last)
        assert part.places.tolist() == places
        inside = (mask.places >= first) & (mask.places < last)
        assert np.array_equal(part.words, mask.words[inside])
        assert np.shares_memory(part.words, mask.words) == bool(places)


def test_another_error_is_no_lack_of_memory() -> None:
    case = Case(all_random=True, accelerator=False, logprobs=False)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        case.pieces(lambda _: True, lambda: RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_what_says_that_memory_ran_out() -> None:
    assert all(is_out_of_memory(make()) for make in ERRORS)
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"))
    for other in (RuntimeError("device lost"), ValueError("DefaultCPUAllocator"), SystemExit(1)):
        assert not is_out_of_memory(other)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value), "PyTorch's own"
    with pytest.raises(MemoryError) as numpys:
        np.empty(2**60, np.uint8)
    assert is_out_of_memory(numpys.value) and "1.00 EiB" in shortage(numpys.value, CPU)
    for make in ERRORS:
        assert "wanted 2" in shortage(make(), CPU) and "are free" in shortage(make(), CPU)
