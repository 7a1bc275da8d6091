"""Families that native code computes, each declared by what its module tree calls things and how they go together.

What can be read off the modules is not declared: kinds of norms and activations, sizes, biases, windows, caps, scales.
The load-time self-check decides whether a declaration is right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from core.models.native.declaration import BesideNames, Family, Mixture
from core.models.native.gpt_families import (
    BIOGPT,
    BLOOM,
    CODEGEN,
    FALCON,
    GPT2,
    GPT_BIGCODE,
    GPT_NEO,
    GPT_NEOX,
    GPTJ,
    MPT,
    OPT,
)
from core.models.native.recurrent_families import (
    BAMBA,
    FALCON_H1,
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    JAMBA,
    LFM2,
    LFM3,
    MAMBA,
    NEMOTRON_H,
)


def _llama4_temperature(attention: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """Llama 4's, of layers that turn nothing: attention over long contexts would flatten (arXiv 2501.19399)."""
    if attention.use_rope or not attention.attn_temperature_tuning:
        return None
    passed = torch.floor((positions.float() + 1.0) / float(attention.floor_scale))
    return 1.0 + float(attention.attn_scale) * torch.log1p(passed)


def _ministral3_temperature(attention: Any, positions: torch.Tensor) -> torch.Tensor:
    given = attention.config.rope_parameters
    passed = torch.floor(positions.float() / float(given["original_max_position_embeddings"]))
    return 1.0 + float(given["llama_4_scaling_beta"]) * torch.log1p(passed)


def _turns_in_windows(attention: Any) -> bool:
    return attention.sliding_window is None or bool(attention.is_sliding)


def _gemma4_lacks(config: Any) -> str | None:
    if config.use_bidirectional_attention == "all":
        return "attention in both directions"
    if getattr(config, "hidden_size_per_layer_input", 0) and config.vocab_size_per_layer_input < config.vocab_size:
        return "tokens that its layers have no inputs for"
    return None


LLAMA = Family()
AROUND = Family(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    logit_cap=lambda config: config.final_logit_softcapping,
    lacks=lambda config: "attention in both directions" if config.use_bidirectional_attention else None,
)
GEMMA4 = replace(
    AROUND,
    v_norm="v_norm",
    shares=lambda attention: attention.is_kv_shared_layer,
    mixture=Mixture(router="router", beside=BesideNames()),
    scale="layer_scalar",
    lacks=_gemma4_lacks,
)
BEHIND = Family(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_mlp="",
    after_mlp="post_feedforward_layernorm",
)
GLM = Family(neighbours=True, into=("gate_up_proj",), activation="activation_fn")
GLM4 = Family(
    after_attention="post_self_attn_layernorm",
    after_mlp="post_mlp_layernorm",
    neighbours=True,
    into=("gate_up_proj",),
    activation="activation_fn",
)
APERTUS = Family(
    before_attention="attention_layernorm",
    before_mlp="feedforward_layernorm",
    into=("up_proj",),
    gated=False,
)
NANOCHAT = Family(
    first_norm="norm",
    turns_first=True,
    backwards=True,
    into=("fc1",),
    gated=False,
    down="fc2",
    activation="activation_fn",
    logit_cap=lambda config: config.final_logit_softcapping,
)
COHERE = Family(
    before_mlp="",
    parallel=lambda config: True,
    neighbours=True,
    logit_multiplier=lambda config: config.logit_scale,
)
COHERE2 = Family(
    before_mlp="",
    parallel=lambda config: True,
    neighbours=True,
    turns=lambda attention: attention.sliding_window is not None or getattr(attention, "force_rope", False),
    logit_multiplier=lambda config: config.logit_scale,
)
COHERE2_MOE = replace(
    COHERE2,
    mixture=Mixture(
        shared="shared_experts",
        means=lambda mixture: mixture.num_shared_experts and mixture.shared_expert_combination_strategy == "average",
    ),
)
PHI = Family(
    final_norm="final_layernorm",
    before_mlp="",
    parallel=lambda config: True,
    out="dense",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    into=("fc1",),
    gated=False,
    down="fc2",
    activation="activation_fn",
)
AFMOE = Family(
    after_attention="post_attention_layernorm",
    before_mlp="pre_mlp_layernorm",
    after_mlp="post_mlp_layernorm",
    qkv=("q_proj", "k_proj", "v_proj", "gate_proj"),
    turns=lambda attention: attention.is_local_attention,
    mixture=Mixture(router="router", shared="shared_experts", correction="expert_bias"),
    embedding_multiplier=lambda config: config.hidden_size**0.5 if config.mup_enabled else 1.0,
)
FLINT = Family(turns=lambda attention: attention.sliding_window is not None, mixture=Mixture(shared="shared_expert"))
KOLIBRI = Family(
    after_attention="post_self_attn_layernorm",
    after_mlp="post_mlp_layernorm",
    turns=_turns_in_windows,
    mixture=Mixture(shared="shared_experts"),
)
LAGUNA = Family(
    qkv=("q_proj", "k_proj", "v_proj", "g_proj"),
    softplus_gates=True,
    mixture=Mixture(shared="shared_experts", factor="routed_scaling_factor"),
    lacks=lambda config: "capped logits of its routers" if config.moe_router_logit_softcapping else None,
)
HUNYUAN = Family(
    q_norm="query_layernorm",
    k_norm="key_layernorm",
    turns_first=True,
    mixture=Mixture(shared="shared_mlp"),
)
HYPERCLOVAX = replace(
    GRANITE,
    after_attention="post_norm1",
    after_mlp="post_norm2",
    logit_multiplier=lambda config: config.logits_scaling,
)
PERSIMMON = Family(
    final_norm="final_layernorm",
    qkv=("query_key_value",),
    by_head=True,
    out="dense",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    into=("dense_h_to_4h",),
    gated=False,
    down="dense_4h_to_h",
    activation="act",
)
MINICPM3 = Family(
    multiplier=lambda config: config.scale_depth / config.num_hidden_layers**0.5,
    logit_multiplier=lambda config: 1.0 / config.logits_scaling,
)
SHARED = Family(mixture=Mixture(shared="shared_experts"))
STABLELM = Family(
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    parallel=lambda config: config.use_parallel_residual,
)
QWEN2_MOE = Family(mixture=Mixture(shared="shared_expert", shared_gate="shared_expert_gate"))
LLAMA4 = Family(
    q_norm="qk_norm",
    k_norm="qk_norm",
    turns=lambda attention: attention.use_rope,
    turns_first=True,
    neighbours=True,
    temperature=_llama4_temperature,
    mlp="feed_forward",
    activation="activation_fn",
    mixture=Mixture(router="router", shared="shared_expert", weighs_inputs=True),
)
FAMILIES: dict[str, Family] = {
    "afmoe": AFMOE,
    "apertus": APERTUS,
    "apertus1p5_text": APERTUS,
    "arcee": Family(into=("up_proj",), gated=False),
    "aria_text": Family(mixture=Mixture(router="router", shared="shared_experts")),
    "axk1": replace(SHARED, after_mlp="mlp.post_mlp_layernorm"),
    "bamba": BAMBA,
    "biogpt": BIOGPT,
    "bloom": BLOOM,
    "codegen": CODEGEN,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "cohere2_moe": COHERE2_MOE,
    "cwm": LLAMA,
    "deepseek_v2": Family(neighbours=True, mixture=Mixture(shared="shared_experts")),
    "deepseek_v3": SHARED,
    "dots1": SHARED,
    "ernie4_5": Family(neighbours=True),
    "ernie4_5_moe": Family(neighbours=True, mixture=Mixture(shared="shared_experts")),
    "exaone": LLAMA,
    "exaone4": replace(BEHIND, turns=_turns_in_windows),
    "exaone_moe": replace(SHARED, turns=_turns_in_windows),
    "falcon": FALCON,
    "falcon_h1": FALCON_H1,
    "falcon_mamba": MAMBA,
    "flex_olmo": BEHIND,
    "flint": FLINT,
    "gemma": LLAMA,
    "gemma2": AROUND,
    "gemma3_text": AROUND,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm": GLM,
    "glm4": GLM4,
    "glm4_moe": SHARED,
    "glm4_moe_lite": SHARED,
    "glm4v_moe_text": SHARED,
    "glm4v_text": GLM4,
    "gpt2": GPT2,
    "gpt_bigcode": GPT_BIGCODE,
    "gpt_neo": GPT_NEO,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": Family(mixture=Mixture(router="router")),
    "gptj": GPTJ,
    "granite": GRANITE,
    "granite_swa": GRANITE,
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": GRANITE_MOE,
    "granitemoehybrid": GRANITE_HYBRID,
    "granitemoeshared": GRANITE_MOE,
    "helium": Family(neighbours=True),
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "hy_v3": SHARED,
    "hyperclovax": HYPERCLOVAX,
    "internlm3": LLAMA,
    "iquestcoder": LLAMA,
    "jais2": Family(into=("up_proj",), gated=False),
    "jamba": JAMBA,
    "kolibri1": KOLIBRI,
    "laguna": LAGUNA,
    "lara_mini": replace(FLINT, recurrence="linear_attn"),
    "lfm2": LFM2,
    "lfm2_moe": replace(LFM2, rotary="pos_emb", mixture=Mixture(correction="expert_bias")),
    "lfm3": LFM3,
    "llama": LLAMA,
    "llama4_text": LLAMA4,
    "mamba": MAMBA,
    "mamba2": MAMBA,
    "mellum": LLAMA,
    "minicpm3": MINICPM3,
    "minimax_m2": LLAMA,
    "ministral": LLAMA,
    "ministral3": Family(temperature=_ministral3_temperature),
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "mpt": MPT,
    "nanochat": NANOCHAT,
    "nemotron": Family(into=("up_proj",), gated=False),
    "nemotron_h": NEMOTRON_H,
    "olmo": Family(lacks=lambda config: "clipped projections" if config.clip_qkv is not None else None),
    "olmo2": BEHIND,
    "olmo3": BEHIND,
    "olmoe": Family(lacks=lambda config: "clipped projections" if config.clip_qkv is not None else None),
    "opt": OPT,
    "persimmon": PERSIMMON,
    "phi": PHI,
    "phi3": Family(qkv=("qkv_proj",), into=("gate_up_proj",), activation="activation_fn"),
    "phimoe": Family(mixture=Mixture(router="router")),
    "qwen2": LLAMA,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": LLAMA,
    "qwen3_5_moe_text": replace(QWEN2_MOE, recurrence="linear_attn"),
    "qwen3_5_text": Family(recurrence="linear_attn"),
    "qwen3_moe": LLAMA,
    "qwen3_next": replace(QWEN2_MOE, recurrence="linear_attn"),
    "qwen3_vl_moe_text": LLAMA,
    "qwen3_vl_text": LLAMA,
    "sarvam_mla": SHARED,
    "sarvam_moe": SHARED,
    "seed_oss": LLAMA,
    "smollm3": Family(turns=lambda attention: attention.use_rope),
    "solar_open": SHARED,
    "stablelm": STABLELM,
    "starcoder2": Family(into=("c_fc",), gated=False, down="c_proj", activation="act"),
    "vaultgemma": replace(AROUND, after_attention="", after_mlp="", lacks=lambda config: None),
    "youtu": LLAMA,
}
"""By model type."""
