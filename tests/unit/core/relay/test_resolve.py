"""Where input ids come from: the three cases, empty parts, consumed staging, and failure in the middle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.batch.schedule_batch import InputStaging
from core.invariants import InvariantViolation
from core.relay.compiled import Entered
from core.relay.payload import RelayPayload
from core.relay.resolve import DecodeRows, resolve_forward_inputs
from tests.unit.core.relay.test_future_map import make, rows

NONE = DecodeRows(rows(), rows(), rows())


def test_prefill_takes_the_staged_ids() -> None:
    future_map, _ = make()
    staging = InputStaging(torch.tensor([4, 5, 6]))
    assert resolve_forward_inputs(staging, NONE, future_map, 3).ids.tolist() == [4, 5, 6]
    assert staging.prefill_ids_cpu is None


def test_decode_relays_from_the_map() -> None:
    future_map, _ = make()
    future_map.publish(rows(2, 3), torch.tensor([10, 20]))
    future_map.stash(rows(2, 3), RelayPayload(torch.tensor([7, 8])))
    decode = DecodeRows(rows(3, 2), torch.tensor([19, 10]), torch.tensor([21, 10]))
    inputs = resolve_forward_inputs(InputStaging(), decode, future_map, 2)
    assert inputs.ids.tolist() == [8, 7] and inputs.decode_lens.tolist() == [20, 10]


def test_encoder_ids_stay_apart_and_are_consumed() -> None:
    future_map, _ = make()
    staging = InputStaging(torch.tensor([4]), None, torch.tensor([7, 8, 9]))
    inputs = resolve_forward_inputs(staging, NONE, future_map, 1, 3)
    assert inputs.ids.tolist() == [4]
    assert inputs.encoder_ids is not None and inputs.encoder_ids.tolist() == [7, 8, 9]
    assert staging == InputStaging()


@pytest.mark.parametrize(("staged", "expected"), [(torch.tensor([7, 8]), 3), (torch.tensor([7]), 0), (None, 1)])
def test_a_wrong_number_of_encoder_ids_leaves_the_staging_whole(staged: torch.Tensor | None, expected: int) -> None:
    future_map, _ = make()
    staging = InputStaging(torch.tensor([4]), None, staged)
    with pytest.raises(InvariantViolation, match="encoder_length"):
        resolve_forward_inputs(staging, NONE, future_map, 1, expected)
    assert staging.prefill_ids_cpu is not None and staging.encoder_ids_cpu is staged


def test_mixed_puts_prompt_chunks_before_decode_tails() -> None:
    future_map, _ = make()
    future_map.publish(rows(5), torch.tensor([30]))
    future_map.stash(rows(5), RelayPayload(torch.tensor([9])))
    staging = InputStaging(torch.tensor([1, 2]), np.array([5]))
    inputs = resolve_forward_inputs(staging, DecodeRows(rows(5), rows(30), rows(30)), future_map, 3)
    assert inputs.ids.tolist() == [1, 2, 9] and inputs.decode_lens.tolist() == [30]
    assert staging == InputStaging()


@pytest.mark.parametrize(("chunked", "decoding"), [(True, True), (True, False), (False, True)])
def test_tokens_stand_behind_chunks_where_their_lengths_say(chunked: bool, decoding: bool) -> None:
    """Row 7 computes positions 3 and 4 of its prompt; rows 2 and 5 have 10 and 20 tokens."""
    chunks = (rows(7, 7), rows(3, 4), rows(5)) if chunked else ()
    at, lens = (rows(2, 5), rows(10, 20)) if decoding else (rows(), rows())
    entered = Entered(rows(8, 9), lens, lens + 1) if decoding else None
    found = [each.tolist() for each in DecodeRows(at, lens, lens).behind(chunks, entered)]
    begun = [[7, 7], [3, 4], [5]] if chunked else [[], [], []]
    tails = [[2, 5], [10, 20], [11, 21]] if decoding else [[], [], []]
    assert found == [first + last for first, last in zip(begun, tails, strict=True)]


def test_nothing_at_all_is_an_empty_step() -> None:
    future_map, _ = make()
    assert resolve_forward_inputs(InputStaging(), NONE, future_map, 0).ids.shape == (0,)


def test_wrong_length_is_caught_and_staging_kept() -> None:
    future_map, _ = make()
    staging = InputStaging(torch.tensor([1, 2]))
    with pytest.raises(InvariantViolation, match="resolve_length"):
        resolve_forward_inputs(staging, NONE, future_map, 3)
    assert staging.prefill_ids_cpu is not None, "what was staged can be inspected or submitted again"
