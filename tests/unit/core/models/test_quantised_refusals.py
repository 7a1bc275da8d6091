"""What cannot be served of quantised checkpoints is refused at load, in one line that names it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.loader import check_checkpoint, load_model
from core.models.quantized import at_load, registry
from tests.support.checkpoints import make_checkpoint
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.quantised import COMPRESSED, make_compressed, make_torchao, make_torchao_from
from tests.unit.core.models.reference import CPU

Settings = dict[str, Any]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _restored(llama: Path) -> Any:
    """The tests change its config.json."""
    file = llama / "config.json"
    content = file.read_text()
    yield
    file.write_text(content)


def refusal(directory: Path, settings: Any = None, dtype: str = "auto") -> str:
    """What loading `directory` says, with `settings` as its quantization_config where given."""
    if settings is not None:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelConfig(str(directory), dtype=dtype), CPU)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"load_in_8bit": True}, "'bitsandbytes'"),
        ({"quant_method": "fbgemm_fp8"}, "'fbgemm_fp8'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "'fp8'"),
        ({"quant_method": "hqq"}, "'hqq'"),
        # transformers itself warns and goes on, with the packed numbers as weights.
        ({"quant_method": "of next year"}, "'of next year'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_methods(llama: Path, settings: Settings, name: str) -> None:
    message = refusal(llama, settings)
    assert f"weights quantised with {name} are not supported" in message
    assert "compressed-tensors, torchao" in message


@pytest.mark.parametrize("settings", [{}, {"quant_method": 7}, {"bits": 4}, [], "int4"], ids=repr)
def test_settings_that_say_nothing(llama: Path, settings: Any) -> None:
    assert "quantization_config" in refusal(llama, settings)


@pytest.mark.parametrize(("name", "library"), [("compressed-tensors", "compressed_tensors"), ("torchao", "torchao")])
def test_a_missing_extra(llama: Path, name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda package: None if package == library else object())
    message = refusal(llama, {"quant_method": name})
    assert f"need the package {library}: pip install 'slipstream[quantization]'" in message


def _scheme(**changes: Any) -> Settings:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    return {"targets": ["Linear"], "weights": weights, **changes}


def _compressed(kind: str = "int-quantized", group: Any = None, **changes: Any) -> Settings:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group or _scheme()},
        **changes,
    }


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": True}

COMPRESSED_REFUSALS: dict[str, tuple[Settings, str]] = {
    "kv cache": (_compressed(kv_cache_scheme=FLOAT8), "a quantised KV cache (kv_cache_scheme)"),
    "transforms": (_compressed(transform_config={"config_groups": {"R1": {}}}), "rotated weights (transforms)"),
    "sparsity": (_compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
    "format": (_compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not supported"),
    "group's format": (
        _compressed(group=_scheme(format="marlin-24")),
        "format 'marlin-24' is not supported",
    ),
    "zero points": (
        _compressed("pack-quantized", _scheme(weights={"num_bits": 8, "type": "int", "symmetric": False})),
        "with zero points (asymmetric) is supported with 4 bits and no quantised activations only",
    ),
    "scale of all tokens": (
        _compressed(group=_scheme(input_activations=DYNAMIC)),
        "requests that share a step would change each other's tokens",
    ),
}


@pytest.mark.parametrize("case", COMPRESSED_REFUSALS)
def test_parts_of_compressed_tensors(llama: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda _: object())
    settings, reason = COMPRESSED_REFUSALS[case]
    assert reason in refusal(llama, settings)


def test_odd_settings_are_refused_and_never_raise_anything_else(llama: Path) -> None:
    """Each value in turn becomes something of another type."""
    pytest.importorskip("compressed_tensors")
    good = _compressed(group=_scheme(input_activations={**DYNAMIC, "strategy": "token"}))
    for path in (
        ("format",),
        ("config_groups",),
        ("config_groups", "group_0"),
        ("config_groups", "group_0", "weights"),
    ):
        for odd in (3, "odd", ["odd"], {"odd": {}}):
            settings = copy.deepcopy(good)
            place: Any = settings
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = odd
            refusal(llama, settings)


def _no_kernel(weight: torch.Tensor) -> torch.Tensor:
    """For eight-bit activations, which is the library's product."""
    from torchao.quantization import Int4Tensor

    out, width = weight.shape
    qdata = torch.zeros(out, width // 2, dtype=torch.int8)
    scales = torch.ones(width // 32, out), torch.zeros(width // 32, out)
    return Int4Tensor(qdata, *scales, [1, 32], weight.shape, activation_dtype=torch.float8_e4m3fn)


def _one_scale(weight: torch.Tensor) -> torch.Tensor:
    from torchao.quantization import Int8Tensor, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    kwargs = QuantizeTensorToInt8Kwargs(granularity=PerTensor())
    return Int8Tensor.from_hp(weight, granularity=PerRow(), act_quant_kwargs=kwargs)


@pytest.mark.parametrize(
    ("pack", "reason"),
    [
        (_no_kernel, "model type 'llama' with weights in torchao Int4Tensor on cpu is not supported"),
        (_one_scale, "requests that share a step would change each other's tokens"),
    ],
)
def test_kinds_of_torchao(tmp_path: Path, pack: Callable[[torch.Tensor], torch.Tensor], reason: str) -> None:
    pytest.importorskip("torchao", reason="needs the extra: pip install slipstream[quantization]")
    directory = make_torchao_from(make_checkpoint("llama", tmp_path / "base"), tmp_path / "made", pack)
    check_checkpoint(directory)
    assert reason in refusal(directory)


def test_torchao_in_another_dtype(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs the extra: pip install slipstream[quantization]")
    directory = make_torchao(make_checkpoint("llama", tmp_path / "base"), tmp_path / "made", "ao-fp8")
    message = refusal(directory, dtype="bfloat16")
    assert "quantised from float32 are not computed in bfloat16; serve them with dtype float32" in message


def test_experts_that_were_left_plain(tmp_path: Path) -> None:
    """transformers 5.23 looks for the scales of experts wherever the linear layers have some, and finds none.

    Up to 5.22 it takes the experts themselves for missing.
    """
    pytest.importorskip("compressed_tensors", reason="needs the extra: pip install slipstream[quantization]")
    base = make_checkpoint("mixtral", tmp_path / "base")
    message = refusal(make_compressed(base, tmp_path / "made", COMPRESSED["ct-w8a16"]))
    looked_for = "cannot be loaded as 'mixtral' with compressed-tensors weights"
    assert looked_for in message or "missing weights model.layers.0.mlp.experts.down_proj" in message


def test_plain_weights_only_are_quantised_at_load(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(directory: Path) -> str:
        with pytest.raises(ModelLoadError) as caught:
            load_model(ModelConfig(str(directory), quantization="int8"), CPU)
        return caught.value.message

    assert "quantised with 'torchao' already" in refused(make_torchao(llama, tmp_path / "made", "ao-int8"))
    assert "encoder-decoders ('bart')" in refused(make_encoder_decoder("bart", tmp_path / "bart"))
    monkeypatch.setattr(at_load, "find_spec", lambda _: None)
    assert "needs the package torchao: pip install" in refused(llama)
