"""Every declared family gives natively what transformers gives, past its windows, in prompts, chunks and decode."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.attention.registry import build_attention
from core.config import ModelConfig
from core.memory.kv_pool import KVPool
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pool import SlidingWindowPool
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model
from core.models.native.families import FAMILIES
from core.models.native.family import UpgradingModel
from core.models.native.reading import NotDense
from core.models.native.weights import check_dense
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes.paged_steps import PagedRows
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel
from tests.unit.core.models.test_native_shapes import LONG, logits, sequences, steps

pytestmark = pytest.mark.usefixtures("native_code")

HEADS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
ODD = HEADS | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 80}
FLAT = {name: size for name, size in HEADS.items() if name not in ("head_dim", "num_key_value_heads")}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 70}
CONVS = {"layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"]}
MAMBA = HEADS | {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
FACTORS = {
    "ssm_in_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.6],
    "ssm_out_multiplier": 1.3,
    "attention_in_multiplier": 0.8,
    "key_multiplier": 0.6,
    "attention_out_multiplier": 1.4,
    "mlp_multipliers": [0.5, 1.5],
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.4,
}
GRANITE_HYBRID = {
    "layer_types": ["mamba", "attention", "mamba"],
    "intermediate_size": 104,
    "shared_intermediate_size": 100,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
}
MAMBA2 = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 1,
    "state_size": 16,
    "chunk_size": 16,
    "max_position_embeddings": 512,
}
MAMBA1 = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 16,
    "time_step_rank": 5,
    "use_mambapy": False,
    "max_position_embeddings": 512,
}
JAMBA = {
    "intermediate_size": 104,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 0,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "mamba_d_state": 20,
    "mamba_dt_rank": 5,
    "mamba_proj_bias": True,
}
NEMOTRON_H = {name: size for name, size in HEADS.items() if name != "num_hidden_layers"} | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mlp_bias": True,
    "use_bias": True,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 72,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [1],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "shared_expert_intermediate_size": 72,
    "attention_bias": True,
}
LLAMA4 = {
    "num_hidden_layers": 3,
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "attention_chunk_size": 50,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 30,
    "attn_scale": 0.7,
    "intermediate_size_mlp": 72,
    "moe_layers": [0, 2],
    "num_local_experts": 8,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
LATENTS = FLAT | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 20,
    "kv_lora_rank": 72,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
COOLED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "llama_4_scaling_beta": 0.3,
}
GROUPS = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}

CASES: dict[str, dict[str, Any]] = {
    "afmoe": HEADS | EXPERTS | TYPES | {"num_experts": 8, "num_dense_layers": 1, "mup_enabled": True},
    "arcee": HEADS,
    "aria_text": HEADS | {"moe_num_experts": 8, "moe_topk": 2},
    "bamba": MAMBA | {"attn_layer_indices": [1], "attention_bias": True},
    "cohere": HEADS | {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": ODD | TYPES | {"logit_scale": 0.5},
    "cohere2_moe": HEADS | EXPERTS | TYPES | {"num_experts": 8, "logit_scale": 0.5},
    "cwm": HEADS | TYPES,
    "deepseek_v2": LATENTS | EXPERTS | GROUPS | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENTS | EXPERTS | GROUPS | {"attention_bias": True},
    "dots1": HEADS | EXPERTS | GROUPS,
    "ernie4_5": HEADS,
    "ernie4_5_moe": HEADS | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40, "moe_layer_start_index": 1},
    "exaone": HEADS,
    "exaone4": HEADS | TYPES,
    "exaone_moe": HEADS | EXPERTS | TYPES | {"num_experts": 8, "n_group": 4, "topk_group": 2},
    "falcon_h1": MAMBA | FACTORS | {"mamba_d_ssm": 128, "attention_bias": True, "mamba_proj_bias": True},
    "falcon_h1, normed": MAMBA | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "falcon_mamba": MAMBA1,
    "flex_olmo": HEADS | {"num_experts": 8, "num_experts_per_tok": 3},
    "gemma": ODD,
    "gemma2": HEADS | TYPES | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": ODD | TYPES | {"query_pre_attn_scalar": 16},
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": HEADS | EXPERTS | GROUPS | {"use_qk_norm": True},
    "glm4_moe_lite": LATENTS | EXPERTS | {"n_routed_experts": 8, "rope_interleave": False},
    "gpt_neox": FLAT,
    "gpt_neox, one after the other": FLAT | {"use_parallel_residual": False},
    "gpt_oss": ODD | TYPES | {"intermediate_size": 104, "num_local_experts": 8, "num_experts_per_tok": 3},
    "gptj": {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
    "granite": HEADS | {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0},
    "granite_swa": HEADS | TYPES | {"residual_multiplier": 0.3},
    "granitemoe": HEADS | {"num_local_experts": 8, "num_experts_per_tok": 3, "residual_multiplier": 0.3},
    "granitemoe_swa": HEADS | TYPES | {"num_local_experts": 8, "num_experts_per_tok": 3},
    "granitemoehybrid": MAMBA | GRANITE_HYBRID | {"num_local_experts": 8, "num_experts_per_tok": 3},
    "granitemoehybrid, dense": MAMBA | GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"},
    "granitemoeshared": HEADS | {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 72},
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS | {"num_experts": 8, "moe_topk": 2},
    "hy_v3": HEADS | EXPERTS | {"num_experts": 8, "router_scaling_factor": 1.5},
    "hyperclovax": HEADS | {"residual_multiplier": 0.3, "logits_scaling": 0.5, "embedding_multiplier": 3.0},
    "internlm3": HEADS,
    "iquestcoder": HEADS,
    "jais2": HEADS,
    "jamba": HEADS | JAMBA,
    "lfm2": HEADS | CONVS | {"num_hidden_layers": 5},
    "lfm2, odd": ODD | CONVS | {"num_hidden_layers": 5, "conv_bias": True, "conv_L_cache": 5},
    "lfm2_moe": HEADS | CONVS | EXPERTS | {"num_hidden_layers": 5, "num_experts": 8, "num_dense_layers": 1},
    "llama": ODD,
    "llama4_text": HEADS | LLAMA4,
    "llama4_text, two experts": ODD | LLAMA4 | {"num_experts_per_tok": 2, "use_qk_norm": False, "attention_bias": True},
    "mamba": MAMBA1,
    "mamba, odd": MAMBA1 | {"state_size": 20, "hidden_size": 48, "use_bias": True, "conv_kernel": 3},
    "mamba2": MAMBA2 | {"time_step_limit": [0.0, 1.2]},
    "mellum": HEADS | EXPERTS | TYPES | {"num_experts": 8},
    "minicpm3": LATENTS | {"qk_nope_head_dim": 16, "dim_model_base": 32},
    "minimax_m2": HEADS | {"num_local_experts": 8, "num_experts_per_tok": 3},
    "ministral": HEADS | TYPES,
    "ministral3": HEADS | {"rope_parameters": COOLED},
    "mistral": HEADS | {"sliding_window": 70},
    "mixtral": HEADS | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "nemotron": HEADS,
    "nemotron_h": NEMOTRON_H,
    "olmo": HEADS,
    "olmo2": HEADS,
    "olmo3": HEADS | TYPES,
    "olmoe": HEADS | {"num_experts": 8, "num_experts_per_tok": 3},
    "persimmon": FLAT,
    "phi": HEADS | {"qk_layernorm": True},
    "phi3": HEADS | {"sliding_window": 70},
    "phimoe": HEADS | {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    "qwen2": HEADS,
    "qwen2_moe": HEADS | EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 72},
    "qwen3": ODD,
    "qwen3_5_moe_text": HEADS | EXPERTS | DELTA,
    "qwen3_5_text": HEADS | DELTA,
    "qwen3_moe": ODD | EXPERTS | {"num_experts": 8, "norm_topk_prob": True},
    "qwen3_moe, some dense": HEADS | EXPERTS | {"num_experts": 8, "mlp_only_layers": [0]},
    "qwen3_next": ODD | EXPERTS | DELTA,
    "sarvam_mla": LATENTS | EXPERTS | GROUPS | {"q_lora_rank": None},
    "sarvam_moe": HEADS | EXPERTS | GROUPS,
    "seed_oss": HEADS,
    "smollm3": HEADS | {"no_rope_layers": [1, 0]},
    "solar_open": HEADS | EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1},
    "stablelm": HEADS | {"qk_layernorm": True, "use_qkv_bias": True},
    "stablelm, parallel": HEADS | {"use_parallel_residual": True},
    "starcoder2": HEADS | {"sliding_window": 70},
    "vaultgemma": HEADS | TYPES | {"query_pre_attn_scalar": 16},
    "youtu": LATENTS,
}


def checkpoint_of(case: str, directory: Path) -> Path:
    return make_checkpoint(case.partition(",")[0], directory / "model", **CASES[case])


def test_every_family_is_tried() -> None:
    assert {case.partition(",")[0] for case in CASES} == set(FAMILIES)


def test_the_documentation_names_every_family() -> None:
    text = Path(__file__).parents[4].joinpath("docs/reference/models.md").read_text()
    listed = text.partition("<!-- native -->")[2].partition("<!-- end of native -->")[0]
    assert re.findall(r"`(\w+)`", listed) == list(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    path = checkpoint_of(case, tmp_path)
    plain, rows = PlainModel(path), sequences()
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    for got, (parts, _) in zip(logits(path, 2), steps(rows), strict=True):
        want = torch.stack([expected[p.row][p.prefix + p.extend - 1] for p in parts])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_windows_beside_chunks_are_left_to_transformers(tmp_path: Path) -> None:
    """A step's table of slots is translated for all layers that hide keys, or for none."""
    model = load_model(ModelConfig(str(checkpoint_of("llama4_text", tmp_path)), native="off"), CPU)
    assert isinstance(model, TransformersModel)
    check_dense(model.module, model.spec)
    first, second, *others = model.spec.kv_layers
    spec = replace(model.spec, kv_layers=(first, replace(second, window=8), *others))
    with pytest.raises(NotDense, match="some of its layers have windows and some have chunks"):
        check_dense(model.module, spec)


@pytest.mark.parametrize("case", ["gemma3_text", "cohere2", "olmo2", "gpt_neox", "youtu"])
def test_bfloat16_stays_within_rounding(case: str, tmp_path: Path) -> None:
    path = checkpoint_of(case, tmp_path)
    plain, rows = PlainModel(path, torch.bfloat16), sequences()
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    scale = max(float(found.abs().max()) for found in expected.values())
    for got, (parts, _) in zip(logits(path, 2, "bfloat16"), steps(rows), strict=True):
        want = torch.stack([expected[p.row][p.prefix + p.extend - 1] for p in parts])
        assert float((got - want).abs().max()) < 0.05 * scale


@pytest.mark.parametrize("case", ["gemma3_text", "gpt_neox", "phi3", "starcoder2", "qwen3_next"])
def test_int8_weights_give_what_transformers_makes_of_them(case: str, tmp_path: Path) -> None:
    """Fused, sorted by kind, gated or not."""
    path = checkpoint_of(case, tmp_path)
    plain = logits(path, 1, "float32", "int8", native="off")
    scale = max(float(found.abs().max()) for found in plain)
    for got, want in zip(logits(path, 2, "float32", "int8"), plain, strict=True):
        assert float((got - want).abs().max()) < 1e-4 * scale


class WindowedRun(PackedRun):
    """The windowed layers in pages of another pool, in another order."""

    def rebind(self) -> None:
        """See `PackedRun`."""
        spec, page = self.model.spec, self.paged.pool.page_size
        windowed = [layer for layer in spec.kv_layers if layer.window is not None]
        full = [layer for layer in spec.kv_layers if layer.window is None]
        self.paged = PagedRows(full, len(self.sequences) - 1, LONG + 2, page_size=page, seed=1)
        pages = self.paged.pool.num_pages
        pool = KVPool(windowed, pages, page, spec.dtype, CPU, WINDOW)
        # What no window shows any more may be anything.
        for layer in windowed:
            pool.k(layer.layer_id)[:] = pool.v(layer.layer_id)[:] = torch.nan
        self.windows = SlidingWindowPool(pool, pages)
        self.windows.table[1:] = torch.randperm(pages, generator=torch.Generator().manual_seed(2)) + 1
        self.model.bind(self.paged.pool, build_attention("auto", CPU), {WINDOW: self.windows})

    def forget(self, row: int, tokens: int) -> None:
        """Take the window pages of the first `tokens` of `row` away: NaN stands in their place."""
        page = self.paged.pool.page_size
        self.windows.table[(self.paged.table[row, : tokens // page * page] // page).long()] = 0


@pytest.mark.parametrize("case", ["gemma3_text", "cohere2"])
def test_windowed_layers_read_their_own_pool_and_nothing_behind_a_window(case: str, tmp_path: Path) -> None:
    path = checkpoint_of(case, tmp_path)
    plain, rows = PlainModel(path), sequences()
    model = load_model(ModelConfig(str(path), dtype="float32", native="wait"), CPU)
    assert isinstance(model, UpgradingModel) and model.native
    run = WindowedRun(model, rows, max_len=LONG + 2)
    for number, (parts, num_extend) in enumerate(steps(rows)):
        if number > 1:
            run.forget(1, parts[0].prefix + 1 - CASES[case]["sliding_window"])
        want = torch.stack([plain.logits(rows[p.row])[p.prefix + p.extend - 1] for p in parts])
        torch.testing.assert_close(run.step(parts, num_extend), want, atol=1e-4, rtol=0)
