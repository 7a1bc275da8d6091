"""Inputs that are encoded together get what each gets alone, and padding stays within its bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.models.encoder_decoder.encoder_batches import MAX_PADDED, encode_inputs, similar_lengths
from tests.unit.core.models.test_encoder_decoder import KINDS, VOCAB, make


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_together_equals_alone(kind: str) -> None:
    encoder = make(kind).get_encoder()
    lens = np.array([5, 40, 6, 1, 38, 5, 41, 1, 17])
    ids = torch.randint(3, VOCAB, (int(lens.sum()),), generator=torch.Generator().manual_seed(0))
    calls = 0

    def counting(**inputs: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        return encoder(**inputs)

    got = encode_inputs(counting, ids, lens)
    want = torch.cat([encoder(input_ids=part[None]).last_hidden_state[0] for part in ids.split(lens.tolist())])
    assert calls == len(similar_lengths(lens)) == 3
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_groups_hold_every_input_once_and_pad_little(seed: int) -> None:
    print(f"seed {seed}")
    draw = np.random.default_rng(seed)
    batched = 0
    for _ in range(200):
        lens = draw.integers(1, 60, draw.integers(1, 30))
        groups = similar_lengths(lens)
        assert sorted(place for group in groups for place in group) == list(range(len(lens)))
        for group in groups:
            assert lens[group].max() * len(group) <= MAX_PADDED * lens[group].sum()
        batched += len(groups) < len(lens)
    assert batched > 100
