"""Four-bit checkpoints of other libraries: their layouts against the floats they stand for, and bad ones by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.loader import load_model
from core.models.native.family import UpgradingModel
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.fakes.paged_steps import Part
from tests.support.packed_int4 import KINDS, make_packed
from tests.support.tiles import same_bits
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel

LONG, ROWS = 40, 12
LAYER = "model.layers.1.mlp.down_proj"


def load(directory: Path, **options: Any) -> Any:
    return load_model(ModelConfig(str(directory), **{"native": "off", **options}), CPU)


def loaded(directory: Path, **options: Any) -> Any:
    """What has to be served: fails its test where it is refused."""
    try:
        return load(directory, **options)
    except (ModelLoadError, AssertionError) as error:
        pytest.fail(f"refused: {error!r}")


def prompts() -> dict[int, list[int]]:
    draw, lengths = random.Random(3), {row: LONG if row == 1 else 2 + row for row in range(1, ROWS)}
    return {row: [draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for row, length in lengths.items()}


def logits(model: Any, rows: dict[int, list[int]], parts: list[Part], chunks: int) -> torch.Tensor:
    """Of the last token of each part, in one step."""
    return PackedRun(model, rows, max_len=LONG + 2).step(parts, chunks).clone()


def together(model: Any) -> torch.Tensor:
    """Logits behind every prompt, all prompts in one step."""
    rows = prompts()
    return logits(model, rows, [Part(row, 0, len(ids)) for row, ids in rows.items()], len(rows))


@pytest.mark.parametrize("name", KINDS)
def test_a_format_stands_for_the_floats_it_was_made_from(name: str, tmp_path: Path) -> None:
    packed, plain = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, name)
    model = load(packed)
    assert "int4" in model.spec.quantization or "pack-quantized" in model.spec.quantization
    rows, oracle = prompts(), PlainModel(plain)
    want = torch.stack([oracle.logits(ids)[-1] for ids in rows.values()])
    torch.testing.assert_close(together(model), want, atol=1e-4, rtol=0)
    assert torch.equal(together(load(packed, quantized_weights="dense")), together(model))


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_native_code_computes_the_same_floats(name: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    packed, plain = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, name)
    model = load(packed, native="wait", dtype=dtype)
    assert isinstance(model, UpgradingModel) and model.native
    rows, oracle = prompts(), PlainModel(plain)
    want = torch.stack([oracle.logits(ids)[-1] for ids in rows.values()])
    assert float((together(model) - want).abs().max()) < tolerance * float(want.abs().max())


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize(
    ("name", "dtype"), [("gptq-act-order", "float32"), ("awq", "bfloat16"), ("ct-sym", "bfloat16")]
)
def test_a_row_alone_is_a_row_of_many_bit_by_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """Few rows are multiplied in registers, up to six of them, and more by way of a cache."""
    packed, _ = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, name)
    model = load(packed, native="wait", dtype=dtype, **same_bits(dtype))
    rows = prompts()
    alone = [logits(model, {1: ids}, [Part(1, 0, len(ids))], 1)[0] for ids in rows.values()]
    for one, many in zip(alone, together(model), strict=True):
        assert torch.equal(one, many)
    last = {row: ids[:1] for row, ids in rows.items()}
    for count in range(1, 9):
        some = {row: last[row] for row in range(1, count + 1)}
        got = logits(model, some, [Part(row, 0, 1) for row in some], count)
        for row in some:
            assert torch.equal(got[row - 1], logits(model, {1: last[row]}, [Part(1, 0, 1)], 1)[0]), (count, row)


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("size", [16, 32, 64, -1])
def test_groups_of_any_size(size: int, tmp_path: Path) -> None:
    """64 and 96 inputs: some groups are short, those of 16 are widened for native code."""
    shape = {"intermediate_size": 104}
    base = make_checkpoint("llama", tmp_path / "base", **shape)
    packed, plain = make_packed(base, tmp_path, "gptq", size if size > 0 else 1 << 20)
    if size < 0:
        _edit(packed, lambda settings: settings.update(group_size=-1))
    model, rows, oracle = load(packed, native="wait"), prompts(), PlainModel(plain)
    assert model.native
    want = torch.stack([oracle.logits(ids)[-1] for ids in rows.values()])
    torch.testing.assert_close(together(model), want, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("native_code")
def test_layers_that_are_multiplied_as_one_may_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of three projections is left plain, and two are sorted each in its way: floats take their place, and a line
    of the log says so."""
    packed, plain = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, "gptq-act-order")
    tensors, floats = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    query, gate = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{query}.{part}"]
    tensors[f"{query}.weight"] = floats[f"{query}.weight"]
    turned = torch.arange(63, -1, -1)
    tensors[f"{gate}.g_idx"] = tensors[f"{gate}.g_idx"][turned].contiguous()
    words = tensors[f"{gate}.qweight"]
    nibbles = torch.stack([words >> 4 * i & 15 for i in range(8)], 1).view(64, -1)[turned].view(8, 8, -1).long()
    made = sum(nibbles[:, i] << 4 * i for i in range(8))
    tensors[f"{gate}.qweight"] = made.where(made < 1 << 31, made - (1 << 32)).int().contiguous()  # type: ignore[union-attr]
    floats[f"{gate}.weight"] = floats[f"{gate}.weight"][:, turned].contiguous()
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO"):
        model = load(packed, native="wait")
    assert model.native
    assert "some of them are not quantised" in caplog.text and "in different orders" in caplog.text
    rows, oracle = prompts(), PlainModel(plain)
    want = torch.stack([oracle.logits(ids)[-1] for ids in rows.values()])
    torch.testing.assert_close(together(model), want, atol=1e-4, rtol=0)


NAMED: dict[str, tuple[str, int, dict[str, Any], list[str]]] = {
    "old names of AWQ": ("awq", 32, {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, ["bits", "group_size"]),
    "AWQ without a size": ("awq", 128, {}, ["group_size"]),
    "whole outputs of AWQ": ("awq", 1 << 20, {"group_size": -1}, []),
    "GPTQ without a size": ("gptq", 128, {}, ["group_size"]),
    "whole outputs of compressed-tensors": ("ct-asym", 1 << 20, {"strategy": "channel", "group_size": None}, []),
    "outputs that fill no word": ("ct-asym", 32, {}, []),
}
"""A format, the inputs of a group, what its settings have instead, and what they have not."""


@pytest.mark.parametrize("case", NAMED)
def test_settings_that_libraries_write_otherwise(case: str, tmp_path: Path) -> None:
    """136 or 140 inputs are more than one group of 128, and 140 outputs, which AWQ cannot have, no number of words."""
    name, size, changes, without = NAMED[case]
    base = make_checkpoint("llama", tmp_path / "base", intermediate_size=136 if name == "awq" else 140)
    packed, plain = make_packed(base, tmp_path, name, size)

    def change(settings: dict[str, Any]) -> None:
        groups = settings.get("config_groups")
        place = groups["group_0"]["weights"] if groups else settings
        place.update(changes)
        for key in without:
            del place[key]

    _edit(packed, change)
    model, ids = loaded(packed), [5, 9, 40]
    assert model.spec.quantization.endswith(("int4", "pack-quantized"))
    want = PlainModel(plain).logits(ids)[-1:]
    torch.testing.assert_close(logits(model, {1: ids}, [Part(1, 0, 3)], 1), want, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("native_code")
def test_layers_that_are_multiplied_as_one_may_have_groups_of_two_sizes(tmp_path: Path) -> None:
    base = make_checkpoint("llama", tmp_path / "base")
    (packed, plain), others = make_packed(base, tmp_path, "ct-sym"), make_packed(base, tmp_path / "64", "ct-sym", 64)
    for directory, other in zip((packed, plain), others, strict=True):
        tensors, given = (load_file(each / "model.safetensors") for each in (directory, other))
        tensors.update({name: tensor for name, tensor in given.items() if "gate_proj" in name})
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    wider = json.loads((others[0] / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    _edit(packed, lambda settings: settings["config_groups"].update(group_1=wider))
    model, ids = load(packed, native="wait"), [5, 9, 40]
    assert model.native
    want = PlainModel(plain).logits(ids)[-1:]
    torch.testing.assert_close(logits(model, {1: ids}, [Part(1, 0, 3)], 1), want, atol=1e-4, rtol=0)


def test_dense_weights_are_of_the_model_s_type(tmp_path: Path) -> None:
    packed, _ = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, "awq")
    model = loaded(packed, quantized_weights="dense", dtype="bfloat16")
    assert model.module.get_submodule(LAYER).weight.dtype == torch.bfloat16


def _edit(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def _broken(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> str:
    """What loading says once `change` was done to the tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return _refusal(directory)


def _refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(directory)
    assert "\n" not in caught.value.message
    return caught.value.message


BROKEN: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": ("gptq", lambda t: t.pop(f"{LAYER}.qzeros"), f"tensor {LAYER}.qzeros is missing"),
    "shape": (
        "gptq",
        lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"][:1].contiguous()}),
        f"tensor {LAYER}.scales has shape [1, 64], not [3, 64]",
    ),
    "type": (
        "awq",
        lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].float()}),
        f"tensor {LAYER}.qweight is of torch.float32, not of torch.int32",
    ),
    "unknown type": (
        "awq",
        lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].to(torch.int16)}),
        f"tensor {LAYER}.qweight is of I16",
    ),
    "not finite": (
        "awq",
        lambda t: t[f"{LAYER}.scales"].view(-1)[0].fill_(torch.nan),
        f"tensor {LAYER}.scales is not of finite floats",
    ),
    "order": (
        "gptq-act-order",
        lambda t: t[f"{LAYER}.g_idx"].fill_(0),
        f"tensor {LAYER}.g_idx cannot be served: its groups do not have 32 inputs each",
    ),
    "order of compressed-tensors": (
        "ct-act-order",
        lambda t: t[f"{LAYER}.weight_g_idx"].fill_(2),
        f"tensor {LAYER}.weight_g_idx cannot be served",
    ),
    "told shape": (
        "ct-sym",
        lambda t: t[f"{LAYER}.weight_shape"].fill_(8),
        f"tensor {LAYER}.weight_shape is [8, 8]",
    ),
    "scales": (
        "ct-sym",
        lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"][:, :2].contiguous()}),
        f"tensor {LAYER}.weight_scale has shape [64, 2], which fits no group_size",
    ),
    "no order": (
        "gptq-act-order",
        lambda t: t.pop(f"{LAYER}.g_idx"),
        f"tensor {LAYER}.g_idx is missing, and the configuration has desc_act",
    ),
    "no order of compressed-tensors": (
        "ct-act-order",
        lambda t: t.pop(f"{LAYER}.weight_g_idx"),
        f"tensor {LAYER}.weight_g_idx is missing, and the configuration has actorder 'group'",
    ),
    "no zeros": (
        "awq",
        lambda t: t.pop(f"{LAYER}.qzeros"),
        f"tensor {LAYER}.qzeros is missing, and the configuration has zero_point",
    ),
    "no zeros of compressed-tensors": (
        "ct-asym",
        lambda t: t.pop(f"{LAYER}.weight_zero_point"),
        f"tensor {LAYER}.weight_zero_point is missing, and the configuration has symmetric: false",
    ),
    "bias": (
        "gptq",
        lambda t: t.update({f"{LAYER}.bias": torch.zeros(1)}),
        f"tensor {LAYER}.bias has shape [1], not [64]",
    ),
    "a layer too many": (
        "gptq",
        lambda t: t.update({"model.layers.7.mlp.up_proj.qweight": torch.zeros(8, 96, dtype=torch.int32)}),
        "unexpected weights model.layers.7.mlp.up_proj.qweight",
    ),
}
"""A format, what becomes of its tensors, and what is said."""


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_tensor_is_named(case: str, tmp_path: Path) -> None:
    name, change, said = BROKEN[case]
    packed, _ = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, name)
    assert said in _broken(packed, change)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gptq", {"bits": 3}, "gptq weights of 3 bits are not supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq checkpoint_format 'marlin' is not supported"),
        ("gptq", {"checkpoint_format": ["gptq"]}, "gptq checkpoint_format ['gptq'] is not supported"),
        ("gptq", {"group_size": "odd"}, "gptq group_size must be a positive number or -1, got 'odd'"),
        ("awq", {"bits": 8}, "awq weights of 8 bits are not supported"),
        ("awq", {"version": "gemv"}, "awq version 'gemv' is not supported"),
        ("awq", {"group_size": 0}, "awq group_size must be a positive number or -1, got 0"),
    ],
)
def test_other_layouts_are_refused(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    packed, _ = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, name)
    _edit(packed, lambda settings: settings.update(changes))
    assert said in _refusal(packed)


def test_a_plain_checkpoint_that_calls_itself_packed(tmp_path: Path) -> None:
    packed, plain = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, "gptq")
    (packed / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    assert "has no layer packed as gptq int4: no tensor ends in qweight" in _refusal(packed)


def test_awq_without_zeros_is_around_the_middle(tmp_path: Path) -> None:
    packed, _ = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, "awq")
    tensors = load_file(packed / "model.safetensors")
    zeros = [name for name in tensors if name.endswith(".qzeros")]
    for name in zeros:
        tensors[name].fill_(-0x77777778)  # eight nibbles of 8
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    before = together(load(packed))
    for name in zeros:
        del tensors[name]
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    _edit(packed, lambda settings: settings.update(zero_point=False))
    assert torch.equal(together(load(packed)), before)


def test_biases_that_a_writer_added(tmp_path: Path) -> None:
    """AutoGPTQ gives every layer a bias, whether the model has one or not."""
    packed, _ = make_packed(make_checkpoint("llama", tmp_path / "base"), tmp_path, "gptq")
    before = together(load(packed))
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".scales")]:
        tensors[f"{name.removesuffix('scales')}bias"] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(together(load(packed)), before)
