"""BART, mBART and T5: a packed decoder over cross pages gives, in any mix of steps, the logits of the plain model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from core.attention.torch_native import TorchNativeAttention
from core.models.cross_attention import CrossAttention
from core.models.encoder_decoder import EncoderDecoder
from tests.fakes.paged_steps import PagedRows, Part

VOCAB = 200
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 256,
}
KINDS: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "mbart": _BART,
    "t5": {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48},
}
ENCODER = {1: 100, 2: 3, 3: 1, 4: 37}
DECODER = {1: 30, 2: 40, 3: 8, 4: 3}
STEPS: list[tuple[list[Part], int]] = [
    ([Part(1, 0, 21), Part(2, 0, 5)], 2),
    ([Part(1, 21, 2), Part(3, 0, 6), Part(2, 5, 1)], 2),
    ([Part(2, 6, 30), Part(4, 0, 1), Part(1, 23, 1), Part(3, 6, 1)], 2),
    ([Part(3, 7, 1), Part(2, 36, 1), Part(4, 1, 1), Part(1, 24, 1), Part(0, 0, 1)], 0),
    ([Part(1, 25, 1), Part(2, 37, 1), Part(4, 2, 1)], 0),
]


def make(kind: str) -> Any:
    ids = {"vocab_size": VOCAB, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **KINDS[kind], **ids)
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1 if parameter.dim() == 1 else 0.35)
        # Tied to the embeddings, it would answer every token with itself, whatever the input.
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32) * 0.35)
    return model.requires_grad_(False)


def worst_error(kind: str, *, swap: bool = False) -> float:
    draw = random.Random(0)
    inputs = {row: [draw.randrange(3, VOCAB) for _ in range(n)] for row, n in ENCODER.items()}
    outputs = {0: [0], **{row: [draw.randrange(3, VOCAB) for _ in range(n)] for row, n in DECODER.items()}}
    plain, packed = make(kind), EncoderDecoder(make(kind))
    with torch.inference_mode():
        want = {
            row: plain(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([outputs[row]])).logits[0]
            for row, ids in inputs.items()
        }
    own = PagedRows(packed.kv_layers, 4, 48, page_size=4)
    cross = PagedRows(packed.kv_layers, 4, 128, page_size=4, seed=1)
    packed.bind(TorchNativeAttention(), CrossAttention(cross.pool, cross.table, TorchNativeAttention()))
    sources = {1: inputs[4], 4: inputs[1], 2: inputs[2], 3: inputs[3]} if swap else inputs
    for row, ids in sources.items():
        packed.encode(row, torch.tensor(ids))
    worst = 0.0
    for parts, num_extend in STEPS:
        ids = [token for p in parts for token in outputs[p.row][p.prefix : p.prefix + p.extend]]
        got = packed.forward(own.batch(parts, num_extend, ids), np.array([p.row for p in parts]))
        assert got.isfinite().all()
        for logits, part in zip(got, parts, strict=True):
            if part.row:
                worst = max(worst, (logits - want[part.row][part.prefix + part.extend - 1]).abs().max().item())
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_packed_decoder_equals_plain_forward(kind: str) -> None:
    worst = worst_error(kind)
    print(f"{kind}: {worst:.2e}")
    assert worst < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_sees_another_requests_encoder(kind: str) -> None:
    assert worst_error(kind, swap=True) > 1e-2


def test_a_row_that_was_never_encoded_does_not_attend() -> None:
    packed = EncoderDecoder(make("bart"))
    own = PagedRows(packed.kv_layers, 1, 16)
    packed.bind(TorchNativeAttention(), CrossAttention(own.pool, own.table, TorchNativeAttention()))
    with pytest.raises(AssertionError, match="never encoded"):
        packed.forward(own.batch([Part(1, 0, 2)], 1, [2, 3]), np.array([1]))


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_packed_equals_generate_token_for_token(kind: str) -> None:
    """32 requests with inputs of 1 to 200 tokens start one after another and decode beside those already running."""
    draw = random.Random(3)
    lengths = [1, 200, *(draw.randint(1, 200) for _ in range(30))]
    inputs = {row: [draw.randrange(3, VOCAB) for _ in range(n)] for row, n in enumerate(lengths, start=1)}
    plain, packed = make(kind), EncoderDecoder(make(kind))
    plain.generation_config.eos_token_id = plain.generation_config.forced_eos_token_id = None
    options = {"max_new_tokens": 12, "num_beams": 1, "do_sample": False, "pad_token_id": 1}
    want = {row: plain.generate(torch.tensor([ids]), **options)[0].tolist() for row, ids in inputs.items()}
    own = PagedRows(packed.kv_layers, 32, 16, page_size=4)
    cross = PagedRows(packed.kv_layers, 32, 200, page_size=8, seed=1)
    packed.bind(TorchNativeAttention(), CrossAttention(cross.pool, cross.table, TorchNativeAttention()))
    known: dict[int, list[int]] = {}
    for step in range(32 // 4 + 12):
        fresh = [row for row in range(4 * step + 1, 4 * step + 5) if row in inputs]
        for row in fresh:
            packed.encode(row, torch.tensor(inputs[row]))
            known[row] = [2]
        running = [row for row, ids in known.items() if len(ids) <= 12 and row not in fresh]
        draw.shuffle(running)
        parts = [Part(row, len(known[row]) - 1, 1) for row in (*fresh, *running)]
        if parts:
            batch = own.batch(parts, len(fresh), [known[part.row][-1] for part in parts])
            logits = packed.forward(batch, np.array([part.row for part in parts]))
            for part, token in zip(parts, logits.argmax(-1).tolist(), strict=True):
                known[part.row].append(token)
    assert known == want
    assert len({tuple(ids) for ids in want.values()}) > 8, "the inputs were meant to decide the outputs"
