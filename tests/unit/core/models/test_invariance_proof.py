"""The proof at load of a deterministic engine finds a model whose logits tell of what else is in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from core.attention.base import AttentionBackend
from core.attention.registry import build_attention
from core.attention.torch_native import TorchNativeAttention
from core.batch.forward_batch import ForwardBatch
from core.config import ModelConfig
from core.errors import ConfigError
from core.memory.companion import DeviceCompanion
from core.memory.kv_format import PLAIN
from core.memory.kv_pool import KVPool
from core.models import invariance_proof
from core.models.base import NO_COMPANIONS, Model, ModelSpec
from core.models.invariance_proof import LENGTHS, prove_invariance
from core.models.loader import load_model
from tests.support.checkpoints import make_checkpoint
from tests.support.interpreted import quick_calls
from tests.unit.core.attention.test_conformance import INTERPRETED
from tests.unit.core.attention.test_triton import interpreted
from tests.unit.core.models.reference import CPU, load


class Told:
    """A `Model` that is proved, but for what `changes` its logits, float32[S, vocab], in a step."""

    def __init__(self, model: Model, changes: Callable[[ForwardBatch, torch.Tensor], None]) -> None:
        self._model = model
        self._changes = changes
        self.steps: list[ForwardBatch] = []

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        self._model.bind(kv_pool, attention, companions)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.steps.append(batch)
        logits = self._model.forward(batch)
        self._changes(batch, logits)
        return logits


def last_bit(logits: torch.Tensor, token: int) -> None:
    """Another last bit in one logit of a token."""
    logits.view(torch.int32)[token, 7] ^= 1


def nothing(batch: ForwardBatch, logits: torch.Tensor) -> None:
    """A model that keeps the promise."""


def in_a_crowd(batch: ForwardBatch, logits: torch.Tensor) -> None:
    if len(batch.input_ids) > 256:
        last_bit(logits, 100)


def in_a_pair(batch: ForwardBatch, logits: torch.Tensor) -> None:
    """One token of a row that decodes beside another, deep in its sequence."""
    if batch.num_extend == 0 and len(batch.rows) == 1 and int(batch.positions[0]) > 128:
        last_bit(logits, 0)


@pytest.fixture
def native(checkpoint_of: Callable[[str], Path], native_code: None) -> Model:
    config = ModelConfig(str(checkpoint_of("llama")), dtype="float32", native="wait", deterministic=True)
    return load_model(config, CPU)


def prove(model: Model) -> None:
    prove_invariance(model, TorchNativeAttention(), CPU, PLAIN)


def test_every_token_comes_alone_together_and_in_pieces(native: Model) -> None:
    model = Told(native, nothing)
    prove(model)
    assert [len(step.input_ids) for step in model.steps[:5]] == [*LENGTHS, sum(LENGTHS)]
    pieces = model.steps[5:]
    assert sum(len(step.input_ids) for step in pieces) == sum(LENGTHS)
    assert any(step.num_extend and step.num_extend < len(step.rows) for step in pieces), "prompts beside decode rows"
    assert any(step.num_extend == 0 for step in pieces), "decode rows alone"
    assert {1, 2, 3, 5, 6, 12, 17, 33} <= {int(size) for step in pieces for size in step.extend_lens_host}
    assert all(int(step.prefix_lens_host[place]) for step in pieces for place in range(step.num_extend, len(step.rows)))


@pytest.mark.parametrize(
    ("changes", "where"), [(in_a_crowd, "1 of 268 tokens other logits beside others"), (in_a_pair, "in pieces")]
)
def test_one_other_bit_ends_the_start(
    changes: Callable[[ForwardBatch, torch.Tensor], None], where: str, native: Model
) -> None:
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM gives .*{where} than alone.*without --deterministic"):
        prove(Told(native, changes))


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_modules_of_transformers_do_not_pass(kind: str, checkpoint_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="other logits"):
        prove(load(checkpoint_of(kind)))


def test_a_context_may_be_shorter_than_the_sequences(native_code: None, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=24)
    prove(load_model(ModelConfig(str(path), dtype="float32", native="wait", deterministic=True), CPU))


@interpreted
@pytest.mark.parametrize(
    ("fixed_products", "fixed_attention"),
    [(True, True), (False, True), (True, False)],
    ids=["both", "parts", "products"],
)
def test_fused_decoders_are_proved_with_fixed_products_and_parts(
    fixed_products: bool, fixed_attention: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU, interpreted: short sequences, past one part of keys."""
    from core.attention.triton import fixed_backend
    from core.models.fused.decoder import FusedDecoder

    if INTERPRETED:
        quick_calls(monkeypatch)
    monkeypatch.setattr(invariance_proof, "LENGTHS", (21, 5))
    monkeypatch.setattr(invariance_proof, "SIZES", (1, 7, 3))
    monkeypatch.setattr(fixed_backend, "PART_BLOCKS", 1)
    model = load(make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1))
    decoder = FusedDecoder(model.module, model.spec, fixed_products)
    attention = build_attention("triton", CPU, invariant=fixed_attention)
    passes = fixed_products and fixed_attention
    with nullcontext() if passes else pytest.raises(ConfigError, match="other logits"):
        prove_invariance(decoder, attention, CPU, PLAIN)
