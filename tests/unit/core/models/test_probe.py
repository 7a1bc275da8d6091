"""Which keys a layer may see is read from the model's own mask rule, at any distance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from core.attention.span import AttentionSpan
from core.models.hf.probe import ModelProbe, Rule, Unsupported, agrees
from tests.support.checkpoints import make_checkpoint
from tests.unit.core.models.reference import load

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


def attention_call(
    probe: ModelProbe, layer: int, *, heads: int = 2, window: int | None = None, rule: Rule | None
) -> None:
    key = torch.zeros(1, heads, 8, 4)
    probe.cache.update(key, key, layer)
    probe.record(key, key, window, rule)


def test_masks_of_a_models_own_making_are_trusted_only_without_windows() -> None:
    probe = ModelProbe(CPU, REACH, ())
    attention_call(probe, 0, rule=None)
    assert probe.spans == {0: AttentionSpan()}
    with pytest.raises(Unsupported, match="not by way of transformers' masks"):
        attention_call(probe, 1, window=9, rule=None)
    with pytest.raises(Unsupported, match="not by way of transformers' masks"):
        attention_call(ModelProbe(CPU, REACH, (AttentionSpan(chunk=9),)), 0, rule=None)


def test_rules_that_are_no_span_are_refused() -> None:
    probe = ModelProbe(CPU, REACH, (AttentionSpan(window=9),))
    with pytest.raises(Unsupported, match="neither a window nor a chunk"):
        attention_call(probe, 0, window=10, rule=windowed(11))


@pytest.mark.parametrize("change", [{"heads": 1, "rule": causal}, {"rule": windowed(9), "window": 9}])
def test_one_layer_cannot_be_two(change: Any) -> None:
    probe = ModelProbe(CPU, REACH, ())
    attention_call(probe, 3, rule=causal)
    attention_call(probe, 3, rule=causal)
    with pytest.raises(Unsupported, match="layer 3 in two different ways"):
        attention_call(probe, 3, **change)


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
