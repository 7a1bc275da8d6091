"""Families of the time of GPT-2 and GPT-3: layer norms, plain MLPs, often one product for queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.models.native.declaration import Family


def _falcon_parallel(config: Any) -> bool:
    return bool(config.parallel_attn or config.new_decoder_architecture)


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
GPT2 = Family(
    layers="h",
    final_norm="ln_f",
    before_attention="ln_1",
    before_mlp="ln_2",
    attention="attn",
    qkv=("c_attn",),
    out="c_proj",
    turns=lambda attention: False,
    places="wpe",
    into=("c_fc",),
    gated=False,
    down="c_proj",
    activation="act",
)
GPTJ = replace(
    GPT2,
    before_mlp="",
    parallel=lambda config: True,
    qkv=Family().qkv,
    out="out_proj",
    turns=Family().turns,
    places="",
    neighbours=True,
    into=("fc_in",),
    down="fc_out",
)
CODEGEN = replace(GPTJ, qkv=("qkv_proj",), shards=4)
GPT_BIGCODE = replace(
    GPT2, lacks=lambda config: None if config.multi_query else "queries, keys and values head by head of each kind"
)
GPT_NEO = replace(
    GPT2,
    attention="attn.attention",
    qkv=Family().qkv,
    out="out_proj",
)
OPT = Family(
    body="decoder",
    final_norm="final_layer_norm",
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    out="out_proj",
    turns=lambda attention: False,
    places="embed_positions",
    mlp="",
    into=("fc1",),
    gated=False,
    down="fc2",
    activation="activation_fn",
    lacks=lambda config: (
        None
        if config.do_layer_norm_before and config.word_embed_proj_dim == config.hidden_size
        else "norms behind what they are added to, or projections of its embeddings"
    ),
)
BIOGPT = replace(OPT, body="", final_norm="layer_norm", lacks=lambda config: None)
BLOOM = replace(
    GPT_NEOX,
    layers="h",
    final_norm="ln_f",
    parallel=lambda config: False,
    attention="self_attention",
    turns=lambda attention: False,
    first_norm="word_embeddings_layernorm",
    activation="gelu_impl",
    lacks=lambda config: "normed states as its residual" if config.apply_residual_connection_post_layernorm else None,
)
FALCON = replace(
    GPT_NEOX,
    layers="h",
    final_norm="ln_f",
    parallel=_falcon_parallel,
    before_attention=("input_layernorm", "ln_attn"),
    before_mlp=("post_attention_layernorm", "ln_mlp"),
    attention="self_attention",
)
MPT = replace(
    GPT2,
    layers="blocks",
    final_norm="norm_f",
    before_attention="norm_1",
    before_mlp="norm_2",
    qkv=("Wqkv",),
    out="out_proj",
    places="",
    mlp="ffn",
    into=("up_proj",),
    down="down_proj",
    lacks=lambda config: "clipped projections" if config.attn_config.clip_qkv else None,
)
