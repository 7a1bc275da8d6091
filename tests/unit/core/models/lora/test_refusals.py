"""An adapter that does not fit is refused in one line that names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelLoadError
from core.models.lora.checkpoint import AdapterLimits, read_adapter
from core.models.lora.patterns import compiled
from tests.support.checkpoints import make_checkpoint
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter
from tests.unit.core.models.reference import load

LIMITS = AdapterLimits(max_rank=8)
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A base's module tree and an adapter that fits it."""
    root = tmp_path_factory.mktemp("refusals")
    base = make_checkpoint("llama", root / "base")
    model: Any = load(base)
    return model.module, make_adapter(base, root / "narrow", 0, **ADAPTERS["narrow"])


def says(**fields: Any) -> Change:
    """adapter_config.json with `fields` replaced."""

    def change(directory: Path) -> None:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def holds(edit: Callable[[dict[str, torch.Tensor]], None]) -> Change:
    """adapter_model.safetensors after `edit`."""

    def change(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)

    return change


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def foreign(tensors: dict[str, torch.Tensor]) -> None:
    for part in "AB":
        tensors[f"base_model.model.model.layers.9.self_attn.q_proj.lora_{part}.weight"] = torch.zeros(2, 2)


def untargeted(tensors: dict[str, torch.Tensor]) -> None:
    for part in "AB":
        tensors[f"base_model.model.model.layers.0.self_attn.k_proj.lora_{part}.weight"] = torch.zeros(2, 2)


def half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[Q]


def only_pickle(directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")


def cut_short(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def header_of_a_terabyte(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])


def empty(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"")


def not_json(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{")


def large_config(directory: Path) -> None:
    (directory / "adapter_config.json").write_text(" " * (1 << 20) + "{}")


def eight_bits(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q] = tensors[Q].to(torch.float8_e4m3fn)


REFUSALS: dict[str, tuple[Change, str]] = {
    "dora": (says(use_dora=True), "use_dora is not supported"),
    "modules_to_save": (says(modules_to_save=["lm_head"]), "modules_to_save is not supported"),
    "fan_in_fan_out": (says(fan_in_fan_out=True), "fan_in_fan_out is not supported"),
    "bias": (says(bias="all"), "bias 'all' is not supported"),
    "expert parameters": (says(target_parameters=["mlp.experts.gate_up_proj"]), "target_parameters is not supported"),
    "another method": (says(peft_type="IA3"), "peft_type 'IA3'"),
    "rank too large": (says(r=9), "r must be a whole number from 1 to 8"),
    "rank too large in a pattern": (says(rank_pattern={"q_proj": 9}), "rank_pattern must be"),
    "rank of zero": (says(r=0), "r must be"),
    "rank of another kind": (says(r=True), "r must be"),
    "rank other than the weights": (says(r=3), "lora_A of model.layers.0.self_attn.q_proj has shape (2, 64)"),
    "no targets": (says(target_modules=[]), "target_modules is empty"),
    "embedding": (says(target_modules=["embed_tokens"]), "names model.embed_tokens, a Embedding"),
    "output matrix": (says(target_modules=["lm_head"]), "names lm_head, the output matrix"),
    "whole block": (says(target_modules=["mlp"]), "names model.layers.0.mlp, a LlamaMLP"),
    "target without weights": (says(target_modules=["q_proj", "v_proj", "o_proj"]), "for which the adapter has no"),
    "unknown module": (holds(foreign), "layers.9.self_attn.q_proj, which the base model does not have"),
    "module that is not targeted": (holds(untargeted), "k_proj, which its target_modules do not name"),
    "wrong shape": (holds(lambda t: t.update({Q: torch.zeros(2, 63)})), "q_proj has shape (2, 63), the base needs"),
    "half a pair": (holds(half), "only one of lora_A and lora_B"),
    "not finite": (holds(lambda t: t.update({Q: torch.full((2, 64), torch.nan)})), "not finite"),
    "another tensor": (holds(lambda t: t.update({"lm_head.weight": torch.zeros(1)})), "is no LoRA matrix"),
    "pickle": (only_pickle, "it has only adapter_model.bin"),
    "truncated": (cut_short, "adapter_model.safetensors is corrupt"),
    "empty file": (empty, "adapter_model.safetensors is corrupt"),
    "huge header": (header_of_a_terabyte, "its header would have 1099511627776 bytes"),
    "configuration that is no JSON": (not_json, "adapter_config.json is not valid JSON"),
    "large configuration": (large_config, "adapter_config.json is larger than 1 MiB"),
    "many patterns": (says(rank_pattern=dict.fromkeys(map(str, range(1025)), 1)), "rank_pattern has 1025 patterns"),
    "many names": (says(target_modules=["q_proj"] * 4097), "target_modules names 4097 modules"),
    "eight bits": (holds(eight_bits), "q_proj is not float32, bfloat16 or float16"),
    "no configuration": (lambda d: (d / "adapter_config.json").unlink(), "it has no adapter_config.json"),
    "costly expression": (says(target_modules=r"(a+)+b"), "too costly"),
    "broken expression": (says(target_modules="("), "no regular expression"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_by_name(good: tuple[Any, Path], tmp_path: Path, case: str) -> None:
    base, adapter = good
    change, message = REFUSALS[case]
    directory = tmp_path / "adapter"
    shutil.copytree(adapter, directory)
    read_adapter(directory, base, torch.float32, LIMITS)
    change(directory)
    with pytest.raises(ModelLoadError) as refused:
        read_adapter(directory, base, torch.float32, LIMITS)
    assert message in refused.value.message
    assert "\n" not in refused.value.message
    assert str(directory) not in refused.value.message, "clients read it"


def test_a_file_beyond_the_bound_is_not_read(good: tuple[Any, Path]) -> None:
    base, adapter = good
    with pytest.raises(ModelLoadError, match="at most 64 are read"):
        read_adapter(adapter, base, torch.float32, AdapterLimits(max_rank=8, max_bytes=64))


def test_fused_experts_are_no_linear_layer(tmp_path: Path, good: tuple[Any, Path]) -> None:
    directory = shutil.copytree(good[1], tmp_path / "adapter")
    says(target_modules=["experts"])(directory)
    moe: Any = load(make_checkpoint("qwen3_moe", tmp_path / "base"))
    with pytest.raises(ModelLoadError, match=r"names model\.layers\.0\.mlp\.experts, a Qwen3MoeExperts"):
        read_adapter(directory, moe.module, torch.float32, LIMITS)


def test_what_attention_over_latents_folds_in_is_refused_by_name(tmp_path: Path, good: tuple[Any, Path]) -> None:
    """Its weight is never called, so the adapter's share would be missing without a word."""
    directory = shutil.copytree(good[1], tmp_path / "adapter")
    says(target_modules=["kv_b_proj"])(directory)
    mla: Any = load(make_checkpoint("deepseek_v3", tmp_path / "base"))
    with pytest.raises(ModelLoadError, match=r"names model\.layers\.0\.self_attn\.kv_b_proj, which attention over"):
        read_adapter(directory, mla.module, torch.float32, LIMITS)


@pytest.mark.parametrize(("kind", "target"), [("jamba", "dt_proj"), ("mamba2", "out_proj")])
def test_weights_that_are_read_and_not_called_are_refused_by_name(
    kind: str, target: str, tmp_path: Path, good: tuple[Any, Path]
) -> None:
    directory = shutil.copytree(good[1], tmp_path / "adapter")
    says(target_modules=[target])(directory)
    model: Any = load(make_checkpoint(kind, tmp_path / "base"))
    with pytest.raises(ModelLoadError, match=rf"\.{target}, whose weight this model reads without calling it"):
        read_adapter(directory, model.module, torch.float32, LIMITS)


def test_a_routed_expert_is_refused_by_name(good: tuple[Any, Path], tmp_path: Path) -> None:
    """Where experts are linear layers: a place in the step's tokens is no place in an expert's."""
    directory = shutil.copytree(good[1], tmp_path / "adapter")
    says(target_modules=["w1"])(directory)
    base: Any = load(make_checkpoint("llama", tmp_path / "base")).module
    base.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.ModuleDict({"w1": torch.nn.Linear(64, 64)})])
    with pytest.raises(ModelLoadError, match=r"names model\.layers\.0\.mlp\.experts\.0\.w1, a routed expert"):
        read_adapter(directory, base, torch.float32, LIMITS)


@pytest.mark.parametrize("pattern", [r".*\.(q|v)_proj", r"model\.layers\.(?:0|1)\..*_proj", r"\d+\.mlp\.\w+"])
def test_what_peft_users_write_is_taken(pattern: str) -> None:
    assert compiled(pattern, "target_modules").pattern == pattern


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r".*.*.*.*b", r"(.*)\1b", r"(?:a?){20}b", "a" * 600])
def test_expressions_that_run_away_are_not_run(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by their looks: what was never compiled is never matched."""
    given: list[str] = []
    monkeypatch.setattr("re.compile", given.append)
    with pytest.raises(ModelLoadError) as refused:
        compiled(pattern, "target_modules")
    assert "too costly" in refused.value.message and not given
