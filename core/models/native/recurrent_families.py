"""Families with recurrent mixers, beside attention or in its place, and what those of Granite have in common."""

from __future__ import annotations

from dataclasses import replace

from core.models.native.declaration import Family, Mixture

GRANITE = Family(
    embedding_multiplier=lambda config: config.embedding_multiplier,
    multiplier=lambda config: config.residual_multiplier,
    logit_multiplier=lambda config: 1.0 / config.logits_scaling,
)
GRANITE_MOE = replace(
    GRANITE,
    mlp="block_sparse_moe",
    into=("input_linear",),
    down="output_linear",
    activation="activation",
    mixture=Mixture(router="router", shared="shared_mlp"),
)
LFM2 = Family(
    final_norm="embedding_norm",
    before_attention="operator_norm",
    before_mlp="ffn_norm",
    recurrence="conv",
    out="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    mlp="feed_forward",
    into=("w1", "w3"),
    down="w2",
    activation="silu",
)
LFM3 = replace(
    LFM2,
    after_attention="post_operator_norm",
    after_mlp="post_ffn_norm",
    qkv=("q_proj", "k_proj", "v_proj", "g_proj"),
    out="o_proj",
    q_norm="q_norm",
    k_norm="k_norm",
)
MAMBA = Family(final_norm="norm_f", before_attention="norm", recurrence="mixer")
BAMBA = Family(final_norm="final_layernorm", before_mlp="pre_ff_layernorm", recurrence="mamba", mlp="feed_forward")
JAMBA = replace(BAMBA, turns=lambda attention: False, mixture=Mixture(router="router"))
NEMOTRON_H = Family(
    final_norm="norm_f",
    before_attention="norm",
    before_mlp="norm",
    attention="mixer",
    recurrence="mixer",
    turns=lambda attention: False,
    mlp="mixer",
    into=("up_proj",),
    gated=False,
    mixture=Mixture(shared="shared_experts"),
    lacks=lambda config: "experts behind a projection to latents" if config.moe_latent_size is not None else None,
)
FALCON_H1 = Family(
    final_norm="final_layernorm",
    before_mlp="pre_ff_layernorm",
    recurrence="mamba",
    mlp="feed_forward",
    attention_input=lambda config: config.attention_in_multiplier,
    factors={
        "k_proj": lambda config: config.key_multiplier,
        "o_proj": lambda config: config.attention_out_multiplier,
        "out_proj": lambda config: config.ssm_out_multiplier,
        "gate_proj": lambda config: config.mlp_multipliers[0],
        "down_proj": lambda config: config.mlp_multipliers[1],
    },
    embedding_multiplier=lambda config: config.embedding_multiplier,
    logit_multiplier=lambda config: config.lm_head_multiplier,
)
GRANITE_HYBRID = replace(
    GRANITE_MOE,
    recurrence="mamba",
    turns=lambda attention: attention.config.position_embedding_type == "rope",
)
