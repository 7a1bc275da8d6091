"""Families that native code computes, each declared by what its module tree calls things and how they go together.

What can be read off the modules is not declared: kinds of norms and activations, sizes, biases, windows, caps, scales.
The load-time self-check decides whether a declaration is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Of = Callable[[Any], Any]
"""Something of a configuration or of a module."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Names in a layer's MLP, which is a mixture where it has these experts; what it lacks is not computed."""

    router: str = "gate"
    experts: str = "experts"
    shared: str = ""
    """The expert that all tokens go to, in the MLP or beside it: an MLP as that of a dense layer of the family.
    Where it is beside an MLP that a layer has not, it is that layer's MLP."""
    shared_gate: str = ""
    weighs_inputs: bool = False
    """Whether what experts read is multiplied by a token's weight, not what they give."""


@dataclass(frozen=True, slots=True)
class Family:
    """Names are attributes of the module one level up; what a layer lacks, or has as None, is not computed."""

    layers: str = "layers"
    final_norm: str = "norm"
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    parallel: Of = lambda config: False
    """Whether attention and the MLP read the same states, by the configuration."""
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    by_head: bool = False
    """Whether the only projection has query, key and value of one head after the other."""
    recurrence: str = ""
    """A recurrent mixer, beside attention or in its place; which kind it is shows in what it has."""
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    turns: Of = lambda attention: True
    """Whether an attention module has rotary embeddings."""
    neighbours: bool = False
    """Whether two neighbours are turned together."""
    mlp: str = "mlp"
    into: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True
    down: str = "down_proj"
    activation: str = "act_fn"
    """An attribute of the MLP, or what it is if it has none: a name of ACTIVATIONS."""
    attention_input: Of = lambda config: 1.0
    """What attention multiplies its input by."""
    factors: Mapping[str, Of] = field(default_factory=dict)
    """By the name of a linear layer, what its outputs are multiplied by."""
    mixture: Mixture = Mixture()
    embedding_multiplier: Of = lambda config: 1.0
    multiplier: Of = lambda config: 1.0
    logit_multiplier: Of = lambda config: 1.0
    logit_cap: Of = lambda config: None
    lacks: Of = lambda config: None
    """What this configuration has that native code does not compute, if there is anything."""


LLAMA = Family()
AROUND = Family(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    logit_cap=lambda config: config.final_logit_softcapping,
    lacks=lambda config: "attention in both directions" if config.use_bidirectional_attention else None,
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
    turns=lambda attention: attention.sliding_window is not None,
    logit_multiplier=lambda config: config.logit_scale,
)
GRANITE = Family(
    embedding_multiplier=lambda config: config.embedding_multiplier,
    multiplier=lambda config: config.residual_multiplier,
    logit_multiplier=lambda config: 1.0 / config.logits_scaling,
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
GPT_NEOX = Family(
    final_norm="final_layer_norm",
    parallel=lambda config: config.use_parallel_residual,
    attention="attention",
    qkv=("query_key_value",),
    by_head=True,
    out="dense",
    into=("dense_h_to_4h",),
    gated=False,
    down="dense_4h_to_h",
    activation="act",
)
GPTJ = Family(
    layers="h",
    final_norm="ln_f",
    before_attention="ln_1",
    before_mlp="",
    parallel=lambda config: True,
    attention="attn",
    out="out_proj",
    neighbours=True,
    into=("fc_in",),
    gated=False,
    down="fc_out",
    activation="act",
)
GRANITE_MOE = replace(
    GRANITE,
    mlp="block_sparse_moe",
    into=("input_linear",),
    down="output_linear",
    activation="activation",
    mixture=Mixture(router="router", shared="shared_mlp"),
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

FAMILIES: dict[str, Family] = {
    "arcee": Family(into=("up_proj",), gated=False),
    "bamba": BAMBA,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "deepseek_v2": Family(neighbours=True, mixture=Mixture(shared="shared_experts")),
    "deepseek_v3": SHARED,
    "dots1": SHARED,
    "ernie4_5_moe": Family(neighbours=True, mixture=Mixture(shared="shared_experts")),
    "falcon_h1": FALCON_H1,
    "falcon_mamba": MAMBA,
    "flex_olmo": BEHIND,
    "gemma": LLAMA,
    "gemma2": AROUND,
    "gemma3_text": AROUND,
    "glm": GLM,
    "glm4": GLM4,
    "glm4_moe": SHARED,
    "glm4_moe_lite": SHARED,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": Family(mixture=Mixture(router="router")),
    "gptj": GPTJ,
    "granite": GRANITE,
    "granitemoe": GRANITE_MOE,
    "granitemoehybrid": GRANITE_HYBRID,
    "granitemoeshared": GRANITE_MOE,
    "helium": Family(neighbours=True),
    "jamba": JAMBA,
    "lfm2": LFM2,
    "llama": LLAMA,
    "mamba": MAMBA,
    "mamba2": MAMBA,
    "minicpm3": MINICPM3,
    "minimax_m2": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "nemotron": Family(into=("up_proj",), gated=False),
    "nemotron_h": NEMOTRON_H,
    "olmo": Family(lacks=lambda config: "clipped projections" if config.clip_qkv is not None else None),
    "olmo2": BEHIND,
    "olmo3": BEHIND,
    "olmoe": Family(lacks=lambda config: "clipped projections" if config.clip_qkv is not None else None),
    "phi": PHI,
    "phi3": Family(qkv=("qkv_proj",), into=("gate_up_proj",), activation="activation_fn"),
    "phimoe": Family(mixture=Mixture(router="router")),
    "qwen2": LLAMA,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": LLAMA,
    "qwen3_moe": LLAMA,
    "qwen3_next": replace(QWEN2_MOE, recurrence="linear_attn"),
    "sarvam_mla": SHARED,
    "seed_oss": LLAMA,
    "smollm3": Family(turns=lambda attention: attention.use_rope),
    "stablelm": STABLELM,
    "starcoder2": Family(into=("c_fc",), gated=False, down="c_proj", activation="act"),
    "youtu": LLAMA,
}
"""By model type."""
