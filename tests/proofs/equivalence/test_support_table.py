"""What the documents call served is what the suites here run, no more and no less."""

from __future__ import annotations

import pytest

from docs.generate import SUPPORT, tried
from tests.proofs.equivalence import (
    test_encoder_decoder_grpc,
    test_greedy_grpc,
    test_images,
    test_recurrent_grpc,
    test_speech,
)
from tests.support.checkpoints import RECURRENT_CONFIGS

SUITES = {
    "Attention only": test_greedy_grpc.KINDS,
    "Recurrent and hybrid": tuple(RECURRENT_CONFIGS),
    "Encoder-decoder": (*test_encoder_decoder_grpc.KINDS, *test_speech.KINDS),
    "Images": {kind.partition(",")[0] for kind in (*test_images.KINDS, *test_images.FURTHER)},
}


@pytest.mark.parametrize("kind", SUITES)
def test_served_is_what_is_compared_with_transformers(kind: str) -> None:
    assert test_recurrent_grpc.RECURRENT_CONFIGS is RECURRENT_CONFIGS
    assert {name.strip("`") for name in tried()[kind][SUPPORT[0]]} == set(SUITES[kind])


def test_every_kind_of_architecture_has_its_suite() -> None:
    assert set(tried()) == set(SUITES)
