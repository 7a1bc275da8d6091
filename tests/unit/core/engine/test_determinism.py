"""A deterministic engine waits for compiled code, and what cannot keep its promise is refused by name at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import (
    EngineConfig,
    ExecutorConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from core.engine.build import build_engine
from core.engine.determinism import REFUSED, settled
from core.engine.report import report
from core.errors import ConfigError
from core.models.native.extension import load_extension
from core.native.kept_library import ExtensionUnavailable
from tests.support.encoder_decoders import make_encoder_decoder

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ASKED: dict[str, tuple[dict[str, Any], torch.device, str]] = {
    "native=off": ({"model": ModelConfig(deterministic=True, native="off")}, CPU, "leave native at auto"),
    "native=off on a GPU": ({"model": ModelConfig(deterministic=True, native="off")}, GPU, "leave native at auto"),
    "adapters": ({"lora": LoraConfig((("name", "folder"),))}, CPU, "without --deterministic"),
    "adapters that come": ({"lora": LoraConfig(directory="folder")}, CPU, "without --deterministic"),
    "speculative=mtp": ({"speculation": SpeculationConfig("mtp")}, CPU, "ngram and draft:DIR do not"),
    "kv_cache_dtype": ({"model": ModelConfig(deterministic=True, kv_cache_dtype="fp8_e4m3")}, CPU, "name one of these"),
    "attention_backend": ({"executor": ExecutorConfig(attention_backend="flashinfer")}, GPU, "leave it at auto"),
}
"""What is asked for, on which device, and what the refusal says to do."""


def deterministic(**fields: Any) -> EngineConfig:
    return replace(EngineConfig(model=ModelConfig(deterministic=True)), **fields)


def served(path: Path, **model: Any) -> EngineConfig:
    """Of that checkpoint, in a small engine."""
    return deterministic(
        model=ModelConfig(str(path), dtype="float32", deterministic=True, **model),
        memory=MemoryConfig(max_running_requests=2, max_total_tokens=512),
        scheduler=SchedulerConfig(chunked_prefill_size=32),
        executor=ExecutorConfig(device="cpu", cpu_threads=1),
    )


@pytest.fixture(scope="module")
def compiled() -> None:
    """Skips what needs a compiler."""
    try:
        load_extension()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", ASKED)
def test_settings_that_take_the_promise_away_are_refused_by_name(name: str) -> None:
    fields, device, remedy = ASKED[name]
    setting = next(each.setting for each in REFUSED if name.startswith(each.setting))
    with pytest.raises(ConfigError) as refused:
        settled(deterministic(**fields), device)
    assert refused.value.message.startswith(f"deterministic is not possible with {setting}: ")
    assert remedy in refused.value.message and "\n" not in refused.value.message


def test_every_refusal_is_tried() -> None:
    assert {each.setting for each in REFUSED} == {
        next(e.setting for e in REFUSED if n.startswith(e.setting)) for n in ASKED
    }


@pytest.mark.parametrize("name", ASKED)
def test_nothing_is_refused_of_other_engines(name: str) -> None:
    fields, device, _ = ASKED[name]
    config = deterministic(**fields)
    config = replace(config, model=replace(config.model, deterministic=False))
    assert settled(config, device) is config


def test_it_waits_for_compiled_code() -> None:
    """Code that took over between two steps would change bits."""
    fields = {"speculation": SpeculationConfig("ngram"), "executor": ExecutorConfig(attention_backend="triton")}
    for device in (CPU, GPU):
        config = settled(deterministic(**fields), device)
        assert config.model.native == "wait" and settled(config, device) == config
    codes = ModelConfig(deterministic=True, kv_cache_dtype="fp8_e4m3")
    assert settled(deterministic(model=codes), GPU).model.native == "wait", "Triton reads codes in the same order"


@pytest.mark.parametrize("found", [build_engine, report], ids=["serve", "check"])
@pytest.mark.parametrize("kind", ["bitnet"])
def test_a_model_that_transformers_computes_is_refused(
    kind: str, found: Callable[[EngineConfig], Any], checkpoint_of: Callable[[str], Path], compiled: None
) -> None:
    wanted = r"deterministic is not possible: \w+LM\w* is computed by the modules of transformers.*serve it without"
    with pytest.raises(ConfigError, match=wanted):
        found(served(checkpoint_of(kind)))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    path = make_encoder_decoder("t5", tmp_path / "model")
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration is an encoder-decoder here"):
        build_engine(served(path))


def test_without_a_compiler_the_start_ends(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable() -> Any:
        raise ExtensionUnavailable("no C++ compiler was found")

    monkeypatch.setattr("core.models.native.family.load_extension", unavailable)
    with pytest.raises(ConfigError, match="LlamaForCausalLM is computed by the modules of transformers"):
        build_engine(served(checkpoint_of("llama")))


def test_what_is_served_is_proved(
    checkpoint_of: Callable[[str], Path], compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: list[str] = []
    monkeypatch.setattr(
        "core.engine.determinism.prove_invariance", lambda model, *_: proved.append(model.spec.architecture)
    )
    built = build_engine(served(checkpoint_of("llama")))
    assert proved == ["LlamaForCausalLM"] and built.config.model.native == "wait"
    config = served(checkpoint_of("llama"))
    build_engine(replace(config, model=replace(config.model, deterministic=False)))
    assert len(proved) == 1, "nothing is proved that was not promised"


def test_a_check_says_that_it_was_proved(checkpoint_of: Callable[[str], Path], compiled: None) -> None:
    told = report(served(checkpoint_of("llama")))
    assert told.served_by == "compiled code"
    assert "proved deterministic: 268 tokens have the same logits alone, together, in pieces" in told.remarks
