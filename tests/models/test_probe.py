"""Which keys a layer may see is read from the model's own mask rule, at any distance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from core.attention.span import AttentionSpan
from core.models.probe import Rule, Unsupported, agrees
from tests.fakes.checkpoints import make_checkpoint
from tests.models.reference import load

CPU = torch.device("cpu")
REACH = 40_000


def chunked(size: int) -> Rule:
    rule: Rule = masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int))
    return rule


def windowed(size: int) -> Rule:
    rule: Rule = masking_utils.sliding_window_causal_mask_function(size)
    return rule


def causal(*at: Any) -> Any:
    return masking_utils.causal_mask_function(*at)


SPANS = [AttentionSpan(), AttentionSpan(window=1), AttentionSpan(window=4096), AttentionSpan(window=4097)]
SPANS += [AttentionSpan(chunk=4096), AttentionSpan(chunk=100), AttentionSpan(window=100), AttentionSpan(window=16)]


def rule_of(span: AttentionSpan) -> Rule:
    if span.window is not None:
        return windowed(span.window)
    return chunked(span.chunk) if span.chunk is not None else causal


@pytest.mark.parametrize("rule_span", SPANS, ids=str)
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_agrees_tells_every_two_spans_apart(rule_span: AttentionSpan, span: AttentionSpan) -> None:
    assert agrees(rule_of(rule_span), span, REACH, CPU) is (rule_span == span)


def test_a_limit_beyond_the_context_is_no_limit() -> None:
    assert agrees(windowed(REACH), AttentionSpan(), REACH, CPU)
    assert not agrees(windowed(REACH - 1), AttentionSpan(), REACH, CPU)


def test_bidirectional_rules_never_agree() -> None:
    rule: Any = masking_utils.bidirectional_mask_function
    assert not agrees(rule, AttentionSpan(), REACH, CPU)


def test_rules_about_content_are_refused() -> None:
    rule = masking_utils.padding_mask_function(torch.ones(1, 8, dtype=torch.bool))
    with pytest.raises(Unsupported, match="more than their positions"):
        agrees(rule, AttentionSpan(), REACH, CPU)


@pytest.mark.parametrize(
    ("kind", "overrides", "expected"),
    [
        ("llama", {}, [(None, None)] * 2),
        ("mistral", {"sliding_window": 300}, [(300, None)] * 2),
        ("mistral", {"sliding_window": None}, [(None, None)] * 2),
        ("gpt_oss", {}, [(16, None), (None, None)]),
        ("llama4_text", {"attention_chunk_size": 200}, [(None, 200), (None, None)]),
        (
            "qwen2",
            {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1},
            [(None, None), (20, None)],
        ),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": False}, [(None, None)] * 2),
    ],
)
def test_finds_the_span_of_every_layer(tmp_path: Any, kind: str, overrides: Any, expected: Any) -> None:
    model: Any = load(make_checkpoint(kind, tmp_path, **overrides))
    assert [(s.window, s.chunk) for s in model._context.spans.values()] == expected
