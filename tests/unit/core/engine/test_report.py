"""What is said of a model before it is served: who computes it, its bytes, and what it would be refused for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig
from core.engine import report as reports
from core.engine.report import ModelReport, report
from core.errors import ModelLoadError
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.quantised import make_quantised

KEYS = ("num_experts", "num_local_experts")
"""By which of them a configuration says how many experts there are, transformers has changed."""
MEMORY = MemoryConfig(max_total_tokens=2048, max_running_requests=4)


def reported(directory: Path, **model: Any) -> ModelReport:
    given = ModelConfig(path=str(directory), **{"native": "off"} | model)
    return report(EngineConfig(model=given, memory=MEMORY, executor=ExecutorConfig(device="cpu", cpu_threads=1)))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.device.bandwidth.CPU_BYTES", 1 << 20)


def test_a_dense_model(checkpoint_of: Callable[[str], Path]) -> None:
    directory = checkpoint_of("llama")
    found, config = reported(directory), json.loads((directory / "config.json").read_text())
    weights = tensors_of(directory)
    assert found.weight_bytes == sum(each.numel() * 4 for each in weights.values())
    looked_up = 0 if config["tie_word_embeddings"] else weights["model.embed_tokens.weight"].numel() * 4
    assert found.read_bytes == found.weight_bytes - looked_up
    heads = config["num_key_value_heads"] * config["head_dim"]
    assert found.kv_bytes_per_token == 2 * config["num_hidden_layers"] * heads * 4 and found.state_bytes == 0
    assert (found.tokens, found.dtype, found.device) == (2048, "float32", "cpu")
    assert found.served_by == "the modules of transformers"
    assert found.tokens_per_second == pytest.approx(found.bandwidth / found.read_bytes) and found.bandwidth > 1e6


def test_the_dtype_and_the_quantisation_asked_for_are_those_told(checkpoint_of: Callable[[str], Path]) -> None:
    whole = reported(checkpoint_of("llama"))
    half = reported(checkpoint_of("llama"), dtype="bfloat16")
    assert half.weight_bytes * 2 == whole.weight_bytes and half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    packed = reported(checkpoint_of("llama"), quantization="int8")
    sizes = {name: each.numel() for name, each in tensors_of(checkpoint_of("llama")).items()}
    embedding = sizes["model.embed_tokens.weight"]
    assert packed.weight_bytes == embedding * 4 + sum(sizes.values()) - embedding and packed.quantization


def test_weights_that_are_quantised_already_are_as_large_as_their_files(tmp_path: Path) -> None:
    directory = make_quantised("ct-w4a16", tmp_path)
    stored = sum(each.nbytes for each in tensors_of(directory).values())
    assert reported(directory, dtype="float32").weight_bytes == stored


def test_a_token_reads_the_experts_that_it_goes_through(checkpoint_of: Callable[[str], Path]) -> None:
    directory = checkpoint_of("qwen3_moe")
    found, config = reported(directory), json.loads((directory / "config.json").read_text())
    weights = tensors_of(directory)
    experts = sum(each.numel() * 4 for name, each in weights.items() if ".experts." in name)
    share = config["num_experts_per_tok"] / next(config[key] for key in KEYS if key in config)
    embedding = 0 if config["tie_word_embeddings"] else weights["model.embed_tokens.weight"].numel() * 4
    assert experts > 0 and found.read_bytes == int(found.weight_bytes - embedding - experts * (1 - share))


def test_recurrent_states_are_a_requests_own(checkpoint_of: Callable[[str], Path]) -> None:
    found = reported(checkpoint_of("mamba2"))
    assert found.state_bytes > 0 and found.kv_bytes_per_token == 0


def test_who_computes_it_is_named(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    compiled = reported(checkpoint_of("llama"), native="auto")
    assert compiled.served_by == "compiled code" and any("native code computes" in each for each in compiled.remarks)
    both = reported(make_encoder_decoder("t5", tmp_path))
    assert both.served_by == "the modules of transformers, encoder and decoder"
    kept = reported(checkpoint_of("llama"), native="auto", kv_cache_dtype="fp8_e4m3")
    assert kept.served_by == "the modules of transformers, with compiled products"
    assert any("native decoders read no keys in fp8_e4m3" in each for each in kept.remarks)


def test_what_cannot_fit_is_refused_before_it_is_loaded(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "available_memory", lambda: 1000)
    monkeypatch.setattr(reports, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ModelLoadError, match="of memory are free"):
        reported(checkpoint_of("llama"))


def test_what_is_refused_at_load_is_refused_here(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    for file in checkpoint_of("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tensors_of(tmp_path)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing weights model\.norm\.weight"):
        reported(tmp_path)
