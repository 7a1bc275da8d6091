"""Small checkpoints of every family that native code computes, with whatever of it can be otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.checkpoints import make_checkpoint

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
FALCON = {name: size for name, size in FLAT.items() if name != "intermediate_size"}
GPT = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
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
GEMMA4 = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 70,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 320,
    "final_logit_softcapping": 20.0,
}
UNIFIED = {name: value for name, value in GEMMA4.items() if "per_layer_input" not in name} | {
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
AXES: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
THREE_AXES = {"rope_parameters": AXES | {"mrope_section": [2, 3, 3]}}
HALF_TURNED = {"rope_parameters": AXES | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
DEEP = {"depth": 1, "hidden_size": 32, "num_heads": 2, "deepstack_visual_indexes": [0]}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_unified_text": ("gemma4_unified", {"mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64}),
    "glm4v_moe_text": ("glm4v_moe", {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}),
    "glm4v_text": ("glm4v", {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", DEEP | {"out_hidden_size": 64}),
    "qwen3_vl_text": ("qwen3_vl", DEEP | {"out_hidden_size": 48}),
}
"""Types of which checkpoints also see -> the type of these, and what of it sees."""
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
LAGUNA = (
    HEADS
    | EXPERTS
    | TYPES
    | {"num_experts": 8, "shared_expert_intermediate_size": 72, "num_attention_heads_per_layer": [2, 4]}
    | {"mlp_layer_types": ["dense", "sparse"]}
)
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
    "apertus": HEADS,
    "apertus1p5_text": HEADS,
    "arcee": HEADS,
    "aria_text": HEADS | {"moe_num_experts": 8, "moe_topk": 2},
    "axk1": LATENTS | EXPERTS | GROUPS | {"mlp_layer_types": ["dense", "sparse"], "rope_interleave": False},
    "bamba": MAMBA | {"attn_layer_indices": [1], "attention_bias": True},
    "biogpt": FLAT | {"scale_embedding": True},
    "bloom": {"vocab_size": 320, "hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": 512},
    "bloom, six heads": {"vocab_size": 320, "hidden_size": 96, "n_layer": 2, "n_head": 6, "seq_length": 512},
    "codegen": GPT | {"n_embd": 128, "n_head": 8, "rotary_dim": 8},
    "cohere": HEADS | {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": ODD | TYPES | {"logit_scale": 0.5},
    "cohere2_moe": HEADS | EXPERTS | TYPES | {"num_experts": 8, "logit_scale": 0.5},
    "cohere2_moe, with experts of all": HEADS | EXPERTS | TYPES | {"num_experts": 8, "num_shared_experts": 2},
    "cohere2_moe, with one of all": HEADS
    | EXPERTS
    | TYPES
    | {"num_experts": 8, "num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
    "cwm": HEADS | TYPES,
    "deepseek_v2": LATENTS | EXPERTS | GROUPS | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENTS | EXPERTS | GROUPS | {"attention_bias": True},
    "dots1": HEADS | EXPERTS | GROUPS,
    "ernie4_5": HEADS,
    "ernie4_5_moe": HEADS | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40, "moe_layer_start_index": 1},
    "exaone": HEADS,
    "exaone4": HEADS | TYPES,
    "exaone_moe": HEADS | EXPERTS | TYPES | {"num_experts": 8, "n_group": 4, "topk_group": 2},
    "falcon": FALCON,
    "falcon, grouped": FALCON | {"num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon, one norm": FALCON
    | {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 100},
    "falcon, one after the other": FALCON | {"multi_query": False, "parallel_attn": False, "bias": True},
    "falcon_h1": MAMBA | FACTORS | {"mamba_d_ssm": 128, "attention_bias": True, "mamba_proj_bias": True},
    "falcon_h1, normed": MAMBA | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "falcon_mamba": MAMBA1,
    "flex_olmo": HEADS | {"num_experts": 8, "num_experts_per_tok": 3},
    "flint": HEADS
    | EXPERTS
    | TYPES
    | {"num_experts": 8, "shared_expert_intermediate_size": 72, "mlp_only_layers": [0]},
    "gemma": ODD,
    "gemma2": HEADS | TYPES | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": ODD | TYPES | {"query_pre_attn_scalar": 16},
    "gemma4_text": HEADS | GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "gemma4_text, several of a type": HEADS
    | GEMMA4
    | {"layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"]}
    | {"num_kv_shared_layers": 2},
    "gemma4_text, experts": HEADS
    | GEMMA4
    | {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40, "enable_moe_block": True}
    | {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4_unified_text": ODD | UNIFIED,
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": HEADS | EXPERTS | GROUPS | {"use_qk_norm": True},
    "glm4_moe_lite": LATENTS | EXPERTS | {"n_routed_experts": 8, "rope_interleave": False},
    "glm4v_moe_text": HEADS | EXPERTS | GROUPS | HALF_TURNED | {"use_qk_norm": True},
    "glm4v_text": HEADS | HALF_TURNED,
    "gpt2": GPT,
    "gpt2, scaled by layer": GPT | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 100},
    "gpt_bigcode": GPT | {"n_inner": 100},
    "gpt_neo": {"vocab_size": 320, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 512}
    | {"attention_types": [[["global", "local"], 2]], "window_size": 70, "intermediate_size": 100},
    "gpt_neox": FLAT,
    "gpt_neox, one after the other": FLAT | {"use_parallel_residual": False},
    "gpt_oss": ODD | TYPES | {"intermediate_size": 104, "num_local_experts": 8, "num_experts_per_tok": 3},
    "gptj": GPT | {"rotary_dim": 8},
    "granite": HEADS | {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0},
    "granite_swa": HEADS | TYPES | {"residual_multiplier": 0.3},
    "granite_swa, angles of each layer": HEADS
    | {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    | {"sliding_window": 70, "layer_rope_theta": [500000, 10000, 0], "residual_multiplier": 0.3},
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
    "kolibri1": HEADS | EXPERTS | TYPES | {"num_experts": 8, "shared_expert_intermediate_size": 72},
    "laguna": LAGUNA,
    "laguna, gates of elements": LAGUNA | {"gating": "per-element", "moe_routed_scaling_factor": 1.5},
    "lara_mini": HEADS | EXPERTS | DELTA | {"attention_bias": False},
    "lara_mini, windows": HEADS | EXPERTS | DELTA | TYPES | {"attention_bias": False},
    "lfm2": HEADS | CONVS | {"num_hidden_layers": 5},
    "lfm2, odd": ODD | CONVS | {"num_hidden_layers": 5, "conv_bias": True, "conv_L_cache": 5},
    "lfm2_moe": HEADS | CONVS | EXPERTS | {"num_hidden_layers": 5, "num_experts": 8, "num_dense_layers": 1},
    "lfm3": HEADS | {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "lfm3, neither gates nor norms behind": ODD
    | {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"], "conv_L_cache": 3}
    | {"use_sandwich_norm": False, "use_attention_gate": False},
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
    "mpt": {"vocab_size": 320, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    "mpt, six heads": {"vocab_size": 320, "d_model": 96, "n_layers": 2, "n_heads": 6, "max_seq_len": 512},
    "nanochat": HEADS,
    "nemotron": HEADS,
    "nemotron_h": NEMOTRON_H,
    "olmo": HEADS,
    "olmo2": HEADS,
    "olmo3": HEADS | TYPES,
    "olmoe": HEADS | {"num_experts": 8, "num_experts_per_tok": 3},
    "opt": FLAT | {"ffn_dim": 100, "word_embed_proj_dim": 64},
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
    "qwen3_vl_moe_text": HEADS | EXPERTS | THREE_AXES | {"num_experts": 8},
    "qwen3_vl_text": ODD | {"rope_parameters": AXES | {"mrope_section": [20, 10, 10]}},
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
"""Model type, and behind a comma what is other than in the case without it -> fields of the configuration."""


def checkpoint_of(case: str, directory: Path) -> Path:
    """The one called `case` below `directory`: a model type, and what is other behind a comma."""
    kind = case.partition(",")[0]
    if kind not in WHOLE:
        return make_checkpoint(kind, directory / "model", **CASES[case])
    whole, seeing = WHOLE[kind]
    return make_checkpoint(whole, directory / "model", text_config=CASES[case], vision_config=seeing)
