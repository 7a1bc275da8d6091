"""Heads of encoders over given states: one call for all texts where the first token decides, else one call each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from core.models.encoder_only.encoder_head import EncoderHead
from core.models.encoder_only.reference import plain_run
from tests.support.encoders import make_encoder

LENS = (3, 5, 2)


@pytest.mark.parametrize(
    ("kind", "fields", "calls"),
    [
        ("bert", {}, 1),
        ("roberta", {}, 1),
        ("albert", {}, 1),
        ("modernbert", {"classifier_pooling": "cls"}, 1),
        ("modernbert", {"classifier_pooling": "mean"}, 3),
        ("gemma3_text", {}, 3),
    ],
)
def test_texts_are_judged_together_where_that_is_right(
    kind: str, fields: dict[str, Any], calls: int, tmp_path: Path
) -> None:
    directory = make_encoder(kind, tmp_path, "ForSequenceClassification", id2label={0: "a", 1: "b"}, **fields)
    whole: Any = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    head, made = EncoderHead(whole), list[int]()
    whole.register_forward_hook(lambda *_: made.append(1))
    torch.manual_seed(5)
    states, ends = torch.randn(sum(LENS), 64), [3, 8, 10]
    found = head.label(states, [0, 3, 8], ends)
    assert (found.shape, head.count, len(made)) == ((3, 2), 2, calls)
    each = [head.label(states[end - size : end], [0], [size])[0] for end, size in zip(ends, LENS, strict=True)]
    torch.testing.assert_close(found, torch.stack(each))


@pytest.mark.parametrize(("kind", "types"), [("bert", 2), ("roberta", 1), ("modernbert", 1), ("deberta-v2", 1)])
def test_the_reference_has_tokens_of_every_type(kind: str, types: int, tmp_path: Path) -> None:
    directory = make_encoder(kind, tmp_path, "ForSequenceClassification", id2label={0: "a"})
    whole: Any = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    reference = plain_run(whole, 320, labels=True)
    assert reference.token_types == types and len(reference.labels) == len(reference.ids)
    assert all(set(each.tolist()) == set(range(types)) for each in reference.types)
