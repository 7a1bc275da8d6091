"""A model is proved once more through the attention that serves it, whatever kind of model it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.attention.base import AttentionBackend
from core.attention.torch_native import TorchNativeAttention
from core.batch.forward_batch import ForwardBatch
from core.config import EngineConfig, ExecutorConfig, ModelConfig
from core.device.streams import DeviceStreams
from core.engine import build
from core.errors import ConfigError
from core.models.attention_proof import prove_attention
from core.models.base import Model
from core.models.loader import load_model
from core.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.encoder_decoders import make_encoder_decoder
from tests.unit.core.attention.test_conformance import DEVICE, INTERPRETED

CPU = torch.device("cpu")
KINDS = ("llama", "gemma3_text", "deepseek_v3", "lfm2")


class Elsewhere(AttentionBackend):
    """Another backend than PyTorch's, which computes as that one does but for what a test spoils."""

    keys = 1.0
    """By how much keys are longer than they should be."""
    calls = 0

    def __init__(self) -> None:
        self._plain = TorchNativeAttention()

    def plan(self, batch: ForwardBatch) -> None:
        type(self).calls += 1
        self._plain.plan(batch)

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        return self._plain.forward(layer_id, q, k * self.keys, v, **rest)


class Crooked(Elsewhere):
    keys = 3.0


class Broken(Elsewhere):
    def plan(self, batch: ForwardBatch) -> None:
        raise ValueError("out of resource: shared memory\nRequired: 300000")


@pytest.fixture(scope="module", params=(*KINDS, "t5", "marian"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    make = make_checkpoint if request.param in KINDS else make_encoder_decoder
    directory = make(request.param, tmp_path_factory.mktemp(request.param), seed=0)
    return load_model(ModelConfig(str(directory), native="off"), CPU)


def test_the_same_logits_are_proved_and_others_end_the_start(model: Model) -> None:
    Elsewhere.calls = 0
    prove_attention(model, Elsewhere())
    assert Elsewhere.calls >= 3, "a prompt, a chunk behind a prefix, and a decode step"
    with pytest.raises(
        ConfigError, match=r"attention by Crooked gives .* other logits than PyTorch's: by .*torch_native"
    ):
        prove_attention(model, Crooked())


def test_what_cannot_run_is_one_line(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"^attention by Broken cannot compute .*: out of resource: shared memory; "):
        prove_attention(model, Broken())


def test_it_was_proved_through_pytorch_at_load(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("proved again")

    monkeypatch.setattr(TorchNativeAttention, "plan", never)
    prove_attention(model, TorchNativeAttention())


def test_an_id_that_is_never_said_is_no_difference(tmp_path: Path) -> None:
    loaded: Any = load_model(ModelConfig(str(make_encoder_decoder("t5", tmp_path, seed=0)), native="off"), CPU)
    loaded.silence((3, 5), CPU)
    with torch.inference_mode():
        try:
            prove_attention(loaded, Elsewhere())
        except ConfigError as error:
            pytest.fail(str(error))


def test_an_engine_starts_with_attention_that_is_right_only(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(checkpoint_of("llama"))
    config = EngineConfig(model=ModelConfig(directory, native="off"), executor=ExecutorConfig(device="cpu"))
    loaded, tokenizer = load_model(config.model, CPU), Tokenizer.load(directory)
    for backend in (Elsewhere, Crooked):
        monkeypatch.setattr(build, "build_attention", lambda *_, backend=backend: backend())
        if backend is Crooked:
            with pytest.raises(ConfigError, match="other logits"):
                build.assemble(config, loaded, tokenizer, DeviceStreams(CPU))
        else:
            build.assemble(config, loaded, tokenizer, DeviceStreams(CPU))


@pytest.mark.skipif(not INTERPRETED, reason="runs interpreted, in the process of the first test, or on CUDA")
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_kernels_are_proved(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own, as they are, and with a store that loses a place."""
    from core.attention.triton.backend import TritonAttention

    loaded = load_model(ModelConfig(str(make_checkpoint(kind, tmp_path, seed=0)), native="off"), torch.device(DEVICE))
    prove_attention(loaded, TritonAttention())
    forward = TritonAttention.forward
    spoiled = lambda self, layer, q, k, v, **rest: forward(self, layer, q, k.roll(1, 1), v, **rest)  # noqa: E731
    monkeypatch.setattr(TritonAttention, "forward", spoiled)
    with pytest.raises(ConfigError, match="other logits"):
        prove_attention(loaded, TritonAttention())
