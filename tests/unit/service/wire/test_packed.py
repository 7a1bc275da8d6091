"""Scores written into bytes are what protobuf would have written."""

from __future__ import annotations

import numpy as np
import pytest

from service.pb.slipstream.v1 import inference_pb2 as pb
from service.wire.packed import label_score_bytes, label_scores, varint

NAMES: dict[str, tuple[str, ...]] = {
    "one": ("good",),
    "of other scripts": ("bon", "märchenhaft", "好"),
    "none, and the same twice": ("", "x", "x"),
    "long": ("a" * 120, "a" * 121, "b" * 127, "b" * 128, "c" * 20_000),
    "many": tuple(f"label {number}" for number in range(4096)),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_every_label_has_its_score(names: tuple[str, ...]) -> None:
    values = np.linspace(-3, 3, len(names), dtype=np.float32)
    want = pb.Classification(
        scores=[pb.LabelScore(label=name, score=value) for name, value in zip(names, values.tolist(), strict=True)]
    )
    packed = label_scores(names, values)
    assert pb.Classification.FromString(packed) == want
    assert label_score_bytes(names) == len(packed)
    again = pb.Classification.FromString(label_scores(names, values + 1))
    assert [each.score for each in again.scores] == (values + 1).tolist(), "what was made before is not changed"
    assert pb.Classification.FromString(packed) == want


@pytest.mark.parametrize("number", [1, 127, 128, 300, 2**14 - 1, 2**14, 2**31 - 1])
def test_a_number_is_written_as_protobuf_writes_it(number: int) -> None:
    assert pb.Usage(prompt_tokens=number).SerializeToString() == b"\x08" + varint(number)
