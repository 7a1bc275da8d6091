"""Quantised checkpoints: what they weigh in memory, what adapters and latent attention make of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.config import ModelConfig
from core.models.loader import check_checkpoint, load_model
from core.models.quantized.grouped import grouped_weight
from core.models.quantized.registry import quant_method
from core.models.quantized.rounding import round_to_groups
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.fakes.paged_steps import Part
from tests.support.quantised import (
    COMPRESSED,
    TORCHAO,
    make_compressed,
    make_quantised,
    make_torchao,
    make_torchao_from,
)
from tests.unit.core.models.lora.peft_oracle import PeftOracle, make_adapter
from tests.unit.core.models.lora.test_adapters import Mixed, SlotWrite
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel

pytest.importorskip("compressed_tensors", reason="needs the extra: pip install slipstream[quantization]")
pytest.importorskip("torchao", reason="needs the extra: pip install slipstream[quantization]")

BITS = {name: 4 if "4" in name else 8 for name in (*COMPRESSED, *TORCHAO)}
"""Per weight in memory."""


def load(directory: Path, held: str = "compressed", dtype: str = "auto") -> Any:
    return load_model(ModelConfig(str(directory), dtype=dtype, quantized_weights=held, native="off"), CPU)


def layer_bytes(model: Any) -> tuple[int, int]:
    """Bytes held by the linear layers inside the blocks, and how many weights they stand for."""
    held = weights = 0
    for name, module in model.module.named_modules():
        if name.endswith("_proj"):
            weights += module.in_features * module.out_features
            held += sum(_nbytes(tensor) for tensor in (*module.parameters(), *module.buffers()))
    return held, weights


def _nbytes(tensor: Any) -> int:
    names = [*getattr(tensor, "tensor_data_names", ()), *getattr(tensor, "optional_tensor_data_names", ())]
    parts = [getattr(tensor, name) for name in names] or [tensor]
    return sum(part.nbytes for part in parts if part is not None)


def some_logits(model: Any) -> torch.Tensor:
    """Of a prompt in two chunks."""
    ids = [random.Random(0).randrange(3, VOCAB_SIZE) for _ in range(20)]
    run = PackedRun(model, {1: ids})
    return torch.cat([run.step([Part(1, 0, 13)], 1), run.step([Part(1, 13, 7)], 1)])


@pytest.mark.parametrize("name", [*COMPRESSED, *TORCHAO])
def test_weights_stay_packed_in_memory(name: str, tmp_path: Path) -> None:
    model = load(make_quantised(name, tmp_path))
    assert model.spec.quantization.startswith("torchao" if name in TORCHAO else "compressed-tensors")
    some_logits(model)
    held, weights = layer_bytes(model)
    print(f"{name} ({model.spec.quantization}): {held} bytes for {weights} weights, {2 * weights} in bf16")
    # The rest are float32 scales, many beside such small matrices: one per 32 weights at most.
    assert weights * BITS[name] / 8 <= held <= weights * (BITS[name] / 8 + 4 / 32 + 0.1) < 2 * weights


def test_plain_weights_are_quantised_at_load_as_torchao_does(tmp_path: Path) -> None:
    """The output matrix too; embeddings, which are looked up, stay as they are."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    directory = make_checkpoint("llama", tmp_path, seed=0)
    model = load_model(ModelConfig(str(directory), dtype="float32", quantization="int8", native="off"), CPU)
    assert model.spec.quantization == "torchao Int8Tensor"
    held, weights = layer_bytes(model)
    assert weights <= held < 1.25 * weights
    plain = PlainModel(directory)
    quantize_(plain.module, Int8WeightOnlyConfig())
    ids = [random.Random(0).randrange(3, VOCAB_SIZE) for _ in range(20)]
    torch.testing.assert_close(some_logits(model)[-1], plain.logits(ids)[-1], atol=1e-4, rtol=0)
    assert not torch.allclose(some_logits(model)[-1], PlainModel(directory).logits(ids)[-1], atol=1e-4)


def test_plain_weights_are_rounded_to_four_bits_at_load(tmp_path: Path) -> None:
    """The output matrix too, though it is the embedding's in the file; a group may be shorter than 128."""
    directory = make_checkpoint("qwen2", tmp_path, seed=0, intermediate_size=200)
    model = load_model(ModelConfig(str(directory), dtype="float32", quantization="int4", native="off"), CPU)
    assert model.spec.quantization == "int4, groups of 128"
    held, weights = layer_bytes(model)
    assert weights / 2 <= held < weights * 0.65
    plain = PlainModel(directory)
    before = plain.module.lm_head.weight
    for module in plain.module.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(round_to_groups(module.weight).dense(torch.float32))
    assert before is plain.module.get_input_embeddings().weight is not plain.module.lm_head.weight
    ids = [random.Random(0).randrange(3, VOCAB_SIZE) for _ in range(20)]
    torch.testing.assert_close(some_logits(model)[-1], plain.logits(ids)[-1], atol=1e-4, rtol=0)
    assert not torch.allclose(some_logits(model)[-1], PlainModel(directory).logits(ids)[-1], atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_rounding_to_four_bits_is_off_by_a_step_at_most(scale: float) -> None:
    """Of a weight in the middle of its group's range by half a step. What is nothing stays nothing."""
    weight = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)) * scale
    weight[3] = 0.0
    found = round_to_groups(weight)
    assert found.scale.shape == (7, 3) and found.zero is not None
    off = (found.dense(torch.float32) - weight).abs()
    steps = found.scale.float()[:, torch.arange(300) // 128]
    assert bool((off[weight.abs() < scale] <= 0.51 * steps[weight.abs() < scale]).all())
    assert float(off.norm() / weight.norm()) < 0.1
    assert not bool(found.dense(torch.float32)[3].any())


def test_int4_tensors_of_torchao_are_served_though_their_product_needs_a_gpu(tmp_path: Path) -> None:
    """(q - 8) scale + zero, as its quantiser makes them: the even input in the low bits, scales by group first."""
    from torchao.quantization import Int4Tensor

    generator = torch.Generator().manual_seed(2)
    floats: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def pack(weight: torch.Tensor) -> torch.Tensor:
        out, width = weight.shape
        q = torch.randint(-8, 8, (out, width), generator=generator)
        scale = 0.02 + 0.01 * torch.rand(width // 32, out, generator=generator)
        zero = 0.01 * torch.randn(width // 32, out, generator=generator)
        group = torch.arange(width) // 32
        floats.setdefault((out, width), []).append(q * scale.t()[:, group] + zero.t()[:, group])
        qdata = (q[:, ::2] & 15 | q[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
        return Int4Tensor(qdata, scale, zero, [1, 32], weight.shape)

    base = make_checkpoint("llama", tmp_path / "base")
    model = load(make_torchao_from(base, tmp_path / "made", pack))
    assert model.spec.quantization == "torchao Int4Tensor"
    held = [each for each in map(grouped_weight, model.module.modules()) if each is not None]
    assert len(held) == sum(map(len, floats.values())) == 14
    for each in held:
        dense = each.dense(torch.float32)
        assert any(torch.allclose(dense, one, atol=1e-6) for one in floats[each.shape])


@pytest.mark.parametrize("name", COMPRESSED)
def test_dense_weights_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    directory = make_quantised(name, tmp_path)
    packed, dense = load(directory), load(directory, "dense")
    assert layer_bytes(dense)[0] >= 4 * layer_bytes(dense)[1]
    assert torch.equal(some_logits(packed), some_logits(dense))


def test_bfloat16_checkpoints_of_torchao_are_computed_in_bfloat16(tmp_path: Path) -> None:
    base = make_checkpoint("llama", tmp_path / "base")
    directory = make_torchao(base, tmp_path / "made", "ao-fp8", torch.bfloat16)
    assert load(directory).spec.dtype == torch.bfloat16


def test_fp8_with_dynamic_activations_is_served_where_torch_computes_it(tmp_path: Path) -> None:
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor, PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    def pack(weight: torch.Tensor) -> torch.Tensor:
        config = Float8MMConfig(use_fast_accum=True)
        kwargs = QuantizeTensorToFloat8Kwargs(granularity=PerRow(), mm_config=config)
        return Float8Tensor.from_hp(weight, granularity=PerRow(), mm_config=config, act_quant_kwargs=kwargs)

    base = make_checkpoint("llama", tmp_path / "base")
    model = load(make_torchao_from(base, tmp_path / "made", pack))
    assert model.spec.quantization == "torchao Float8Tensor"


def test_experts_in_one_tensor_are_unpacked_at_load(tmp_path: Path) -> None:
    """transformers holds all experts of a layer as one parameter, which no format here packs."""
    model = load(make_quantised("ct-moe", tmp_path))
    weights = load_file(tmp_path / "base" / "model.safetensors")
    found = dict(model.module.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    wanted = torch.stack([weights[f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight"] for i in range(4)])
    assert found.dtype == torch.float32
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert 0 < error < 0.1, error


def test_plain_experts_beside_four_bits_are_served(tmp_path: Path) -> None:
    """The library looks for their scales and finds none; here a layer is packed if the file says so."""
    directory = make_compressed(
        make_checkpoint("mixtral", tmp_path / "base"), tmp_path / "made", COMPRESSED["ct-w4a16"]
    )
    model = load(directory)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    found = dict(model.module.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    wanted = torch.stack([weights[f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight"] for i in range(4)])
    assert torch.equal(found, wanted)
    assert grouped_weight(model.module.model.layers[0].self_attn.q_proj) is not None


def test_mxfp4_is_widened_and_asks_no_one_for_kernels(tmp_path: Path) -> None:
    """Left to itself, transformers fetches kernels from the network where there is a GPU."""
    directory = make_quantised("mxfp4", tmp_path)
    method = quant_method(check_checkpoint(directory))
    assert method is not None and method.load_options()["quantization_config"].dequantize
    assert load(directory).spec.quantization == "mxfp4, widened at load"


def test_attention_over_latents_is_left_alone(tmp_path: Path) -> None:
    base = make_checkpoint("deepseek_v2", tmp_path / "base", first_k_dense_replace=2)
    plain = load(base).spec.kv_layers[0]
    packed = load(make_compressed(base, tmp_path / "made", COMPRESSED["ct-naive"])).spec.kv_layers[0]
    assert (plain.v_in_k, packed.v_in_k) == (True, False)
    dense = load(tmp_path / "made", "dense").spec.kv_layers[0]
    assert dense == packed


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_latents_are_kept_where_weights_are_quantised_at_load(quantization: str, tmp_path: Path) -> None:
    """What expands them stays as it is, all other matrices do not."""
    path = make_checkpoint("deepseek_v2", tmp_path)
    model = load_model(ModelConfig(str(path), dtype="float32", quantization=quantization, native="off"), CPU)
    assert all(layer.v_in_k for layer in model.spec.kv_layers)
    held, weights = layer_bytes(model)
    assert held < 2 * weights


@pytest.mark.parametrize("name", ["ct-w4a16", "ao-int8"])
def test_adapters_over_quantised_weights_equal_peft(name: str, tmp_path: Path) -> None:
    directory = make_quantised(name, tmp_path)
    targets = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
    adapter = make_adapter(tmp_path / "base", tmp_path / "adapter", 0, **targets)
    draw = random.Random(1)
    prompts = {row: [draw.randrange(3, VOCAB_SIZE) for _ in range(10 + row)] for row in (1, 2, 3)}
    mixed = Mixed(directory, {row: list(ids) for row, ids in prompts.items()}, {1: 0, 2: 1, 3: 1})
    mixed.pending = [SlotWrite(1, mixed.read(adapter))]
    while mixed.step():
        pass
    oracle = PeftOracle(directory, {"a": adapter})
    for row, prompt in prompts.items():
        assert mixed.answer(row) == oracle.greedy(prompt, None if row == 1 else "a", 12), row
    assert mixed.answer(2) != oracle.greedy(prompts[2], None, 12), "the adapter changes nothing"
