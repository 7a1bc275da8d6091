"""Where input ids come from: the three cases, empty parts, consumed staging, and failure in the middle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.batch.schedule_batch import InputStaging
from core.invariants import InvariantViolation
from core.relay.payload import RelayPayload
from core.relay.resolve import resolve_forward_inputs
from tests.unit.core.relay.test_future_map import make, rows

NONE = rows()


def test_prefill_takes_the_staged_ids() -> None:
    future_map, _ = make()
    staging = InputStaging(torch.tensor([4, 5, 6]))
    assert resolve_forward_inputs(staging, NONE, None, future_map, 3).ids.tolist() == [4, 5, 6]
    assert staging.prefill_ids_cpu is None


def test_decode_relays_from_the_map() -> None:
    future_map, _ = make()
    future_map.publish(rows(2, 3), torch.tensor([10, 20]))
    future_map.stash(rows(2, 3), RelayPayload(torch.tensor([7, 8])))
    inputs = resolve_forward_inputs(InputStaging(), rows(3, 2), torch.tensor([20, 10]), future_map, 2)
    assert inputs.ids.tolist() == [8, 7]


def test_encoder_ids_stay_apart_and_are_consumed() -> None:
    future_map, _ = make()
    staging = InputStaging(torch.tensor([4]), None, torch.tensor([7, 8, 9]))
    inputs = resolve_forward_inputs(staging, NONE, None, future_map, 1, 3)
    assert inputs.ids.tolist() == [4]
    assert inputs.encoder_ids is not None and inputs.encoder_ids.tolist() == [7, 8, 9]
    assert staging == InputStaging()


@pytest.mark.parametrize(("staged", "expected"), [(torch.tensor([7, 8]), 3), (torch.tensor([7]), 0), (None, 1)])
def test_a_wrong_number_of_encoder_ids_leaves_the_staging_whole(staged: torch.Tensor | None, expected: int) -> None:
    future_map, _ = make()
    staging = InputStaging(torch.tensor([4]), None, staged)
    with pytest.raises(InvariantViolation, match="encoder_length"):
        resolve_forward_inputs(staging, NONE, None, future_map, 1, expected)
    assert staging.prefill_ids_cpu is not None and staging.encoder_ids_cpu is staged


def test_mixed_puts_prompt_chunks_before_decode_tails() -> None:
    future_map, _ = make()
    future_map.stash(rows(5), RelayPayload(torch.tensor([9])))
    staging = InputStaging(torch.tensor([1, 2]), np.array([5]))
    assert resolve_forward_inputs(staging, rows(5), None, future_map, 3).ids.tolist() == [1, 2, 9]
    assert staging == InputStaging()


def test_nothing_at_all_is_an_empty_step() -> None:
    future_map, _ = make()
    assert resolve_forward_inputs(InputStaging(), NONE, None, future_map, 0).ids.shape == (0,)


def test_wrong_length_is_caught_and_staging_kept() -> None:
    future_map, _ = make()
    staging = InputStaging(torch.tensor([1, 2]))
    with pytest.raises(InvariantViolation, match="resolve_length"):
        resolve_forward_inputs(staging, NONE, None, future_map, 3)
    assert staging.prefill_ids_cpu is not None, "what was staged can be inspected or submitted again"
