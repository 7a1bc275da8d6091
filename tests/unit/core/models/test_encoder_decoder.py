"""BART, T5 and their kin: a packed decoder over cross pages gives the logits of the plain model in any mix of steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from core.attention.torch_native import TorchNativeAttention
from core.batch.forward_batch import ForwardBatch
from core.device.staging import Staging
from core.invariants import InvariantViolation
from core.memory.companion import AdmissionFacts
from core.memory.cross.cross_pages import NO_PAGES, CrossPages
from core.memory.cross.cross_pool import CrossPool
from core.memory.kv_pool import KVPool
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.encoder_decoder.cross_attention import CrossAttention
from core.models.encoder_decoder.model import EncoderDecoder
from tests.support.fakes.paged_steps import PagedRows, Part

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
_T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48}
KINDS: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "mbart": _BART,
    "t5": _T5,
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "pegasus": _BART,
    "marian": _BART,
    "plbart": _BART,
    "blenderbot": _BART,
    "blenderbot-small": _BART,
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


class Served:
    """A packed model over cross pages in shuffled order; what no step wrote there reads as 50."""

    def __init__(self, kind: str, rows: int, page_size: int) -> None:
        self.model = EncoderDecoder(make(kind))
        self.host = CrossPages(pages := rows * 200 // page_size, page_size, rows + 1)
        taken = self.host.allocator.alloc(pages)
        assert taken is not None
        self.host.allocator.free(np.random.default_rng(0).permutation(taken))
        device = torch.device("cpu")
        pool = KVPool(self.model.kv_layers, pages, page_size, torch.float32, device)
        for spec in pool.layers:
            pool.k(spec.layer_id)[page_size:] = pool.v(spec.layer_id)[page_size:] = 50.0
        self.cross = CrossPool(ReqToTokenPool(rows, 8, device), pool, 200)
        attention = CrossAttention(self.cross, TorchNativeAttention())
        self.model.bind(TorchNativeAttention(), attention)

    def forward(self, batch: ForwardBatch, inputs: dict[int, list[int]] | None = None) -> torch.Tensor:
        """One step; `inputs` are encoded before it, for rows of the batch that had none."""
        inputs = inputs or {}
        rows = batch.rows.numpy()
        fresh = [row for row in rows.tolist() if row in inputs]
        for row in reversed(fresh):
            self.host.admitted(row, AdmissionFacts(0, NO_PAGES, 0, len(inputs[row])))
        writes = self.host.planned(rows, batch.prefix_lens_host, batch.extend_lens_host, NO_PAGES)
        self.cross.begin(batch.rows, writes, Staging(batch.rows.device))
        if fresh:
            batch.encoder_ids = torch.tensor([token for row in fresh for token in inputs[row]])
            batch.encoder_lens_host = np.array([len(inputs[row]) for row in fresh])
        return self.model.forward(batch)


def worst_error(kind: str, *, swap: bool = False) -> float:
    draw = random.Random(0)
    inputs = {row: [draw.randrange(3, VOCAB) for _ in range(n)] for row, n in ENCODER.items()}
    outputs = {0: [0], **{row: [draw.randrange(3, VOCAB) for _ in range(n)] for row, n in DECODER.items()}}
    plain, packed = make(kind), Served(kind, 4, page_size=4)
    with torch.inference_mode():
        want = {
            row: plain(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([outputs[row]])).logits[0]
            for row, ids in inputs.items()
        }
    own = PagedRows(packed.model.kv_layers, 4, 48, page_size=4)
    sources = {1: inputs[4], 4: inputs[1], 2: inputs[2], 3: inputs[3]} if swap else inputs
    left, worst = dict(sources), 0.0
    for parts, num_extend in STEPS:
        ids = [token for p in parts for token in outputs[p.row][p.prefix : p.prefix + p.extend]]
        got = packed.forward(own.batch(parts, num_extend, ids), left)
        left = {row: ids for row, ids in left.items() if row not in {p.row for p in parts}}
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
    packed = Served("bart", 1, page_size=4)
    own = PagedRows(packed.model.kv_layers, 1, 16)
    with pytest.raises(InvariantViolation, match="cross_row_encoded"):
        packed.forward(own.batch([Part(1, 0, 2)], 1, [2, 3]))


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["bart", "mbart", "t5"])
def test_greedy_packed_equals_generate_token_for_token(kind: str) -> None:
    """32 requests with inputs of 1 to 200 tokens start one after another and decode beside those already running."""
    draw = random.Random(3)
    lengths = [1, 200, *(draw.randint(1, 200) for _ in range(30))]
    inputs = {row: [draw.randrange(3, VOCAB) for _ in range(n)] for row, n in enumerate(lengths, start=1)}
    plain, packed = make(kind), Served(kind, 32, page_size=8)
    plain.generation_config.eos_token_id = plain.generation_config.forced_eos_token_id = None
    options = {"max_new_tokens": 12, "num_beams": 1, "do_sample": False, "pad_token_id": 1}
    want = {row: plain.generate(torch.tensor([ids]), **options)[0].tolist() for row, ids in inputs.items()}
    own = PagedRows(packed.model.kv_layers, 32, 16, page_size=4)
    known: dict[int, list[int]] = {}
    for step in range(32 // 4 + 12):
        fresh = [row for row in range(4 * step + 1, 4 * step + 5) if row in inputs]
        for row in fresh:
            known[row] = [2]
        running = [row for row, ids in known.items() if len(ids) <= 12 and row not in fresh]
        draw.shuffle(running)
        parts = [Part(row, len(known[row]) - 1, 1) for row in (*fresh, *running)]
        if parts:
            batch = own.batch(parts, len(fresh), [known[part.row][-1] for part in parts])
            logits = packed.forward(batch, {row: inputs[row] for row in fresh})
            for part, token in zip(parts, logits.argmax(-1).tolist(), strict=True):
                known[part.row].append(token)
    assert known == want
    assert len({tuple(ids) for ids in want.values()}) > 8, "the inputs were meant to decide the outputs"
