"""Shapes of 36 to 143 million parameters, one for each family of the support table that has no encoder.

Small enough for all of them to be measured on two cores, large enough for weights to count beside the interpreter.
Layers are as a family's own checkpoints have them: windows in most layers where it has windows, experts where it has
experts. `docs/reference/models.md` has the table.
"""

from __future__ import annotations

from typing import Any, Final

LAYERS: Final = 10
CONTEXT: Final = 4096
WINDOW: Final = 512
_ENDS: Final = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES: Final = _ENDS | {
    "vocab_size": 16384,
    "hidden_size": 640,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": CONTEXT,
}
_DENSE: Final = _SIZES | {
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_GPT: Final = _ENDS | {
    "vocab_size": 16384,
    "n_embd": 640,
    "n_layer": LAYERS,
    "n_head": 10,
    "n_positions": CONTEXT,
}
_EXPERTS: Final = _DENSE | {"num_experts_per_tok": 4, "moe_intermediate_size": 320}
_MLA: Final = {name: value for name, value in _DENSE.items() if name != "head_dim"} | {
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 320,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
_MAMBA2: Final = _DENSE | {
    "mamba_n_heads": 20,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_chunk_size": 128,
    "mamba_expand": 2,
}
_MAMBA1: Final = _SIZES | {"state_size": 16, "time_step_rank": 40, "use_mambapy": False, "tie_word_embeddings": True}


def _layers(usual: str, every: int, other: str) -> list[str]:
    """`usual` layers, of which the last of every `every` is the `other` kind."""
    return [other if (layer + 1) % every == 0 else usual for layer in range(LAYERS)]


_FIVE_TO_ONE: Final = {"layer_types": _layers("sliding_attention", 5, "full_attention"), "sliding_window": WINDOW}
_BY_TURNS: Final = {"layer_types": _layers("sliding_attention", 2, "full_attention"), "sliding_window": WINDOW // 4}

_OLD: Final = _ENDS | {"vocab_size": 16384, "hidden_size": 640}
FAMILY_SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "mistral": _DENSE | {"sliding_window": WINDOW},
    "gemma2": _DENSE | _BY_TURNS | {"query_pre_attn_scalar": 64},
    "gemma3_text": _DENSE | _FIVE_TO_ONE | {"query_pre_attn_scalar": 64},
    "gemma4_text": _DENSE
    | _FIVE_TO_ONE
    | {
        "num_kv_shared_layers": LAYERS // 2,
        "global_head_dim": 128,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 16384,
    },
    "cohere2": _DENSE | _FIVE_TO_ONE | {"logit_scale": 1.0},
    "gpt2": _GPT | {"tie_word_embeddings": True},
    "gptj": _GPT | {"rotary_dim": 32, "tie_word_embeddings": False},
    "bloom": _OLD | {"n_layer": LAYERS, "n_head": 10, "seq_length": CONTEXT},
    "falcon": _OLD | {"num_hidden_layers": LAYERS, "num_attention_heads": 10, "max_position_embeddings": CONTEXT},
    "gpt_neo": _OLD
    | {"num_layers": LAYERS, "num_heads": 10, "max_position_embeddings": CONTEXT, "window_size": WINDOW}
    | {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "mpt": _OLD | {"n_layers": LAYERS, "n_heads": 10, "max_seq_len": CONTEXT},
    "qwen3_moe": _EXPERTS | {"num_experts": 16},
    "mixtral": _DENSE | {"intermediate_size": 640, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": _DENSE | _BY_TURNS | {"intermediate_size": 320, "num_local_experts": 16, "num_experts_per_tok": 4},
    "llama4_text": _DENSE
    | {
        "intermediate_size": 640,
        "intermediate_size_mlp": 2048,
        "num_local_experts": 8,
        "attention_chunk_size": WINDOW,
        "layer_types": _layers("chunked_attention", 5, "full_attention"),
    },
    "deepseek_v2": _MLA | {"q_lora_rank": None},
    "deepseek_v3": _MLA | {"q_lora_rank": 256},
    "qwen3_next": _EXPERTS
    | {
        "layer_types": _layers("linear_attention", 5, "full_attention"),
        "num_experts": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "shared_expert_intermediate_size": 320,
    },
    "bamba": _MAMBA2 | {"attn_layer_indices": [4, 9]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 1280, "intermediate_size": 1024},
    "granitemoehybrid": _MAMBA2
    | {
        "layer_types": _layers("mamba", 5, "attention"),
        "intermediate_size": 320,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "shared_intermediate_size": 640,
    },
    "nemotron_h": {name: value for name, value in _DENSE.items() if name != "num_hidden_layers"}
    | {
        "layers_block_type": ["mamba", "moe", "mamba", "moe", "attention"] * 3,
        "mamba_num_heads": 20,
        "mamba_head_dim": 64,
        "n_groups": 1,
        "ssm_state_size": 64,
        "chunk_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 320,
        "moe_shared_expert_intermediate_size": 640,
    },
    "lfm2": _DENSE | {"layer_types": _layers("conv", 3, "full_attention"), "block_auto_adjust_ff_dim": False},
    "mamba2": _SIZES
    | {
        "num_heads": 20,
        "head_dim": 64,
        "expand": 2,
        "state_size": 64,
        "n_groups": 1,
        "chunk_size": 128,
        "tie_word_embeddings": True,
    },
    "jamba": {name: value for name, value in _DENSE.items() if name != "head_dim"}
    | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "attn_layer_period": 5,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "intermediate_size": 640,
        "mamba_d_state": 16,
        "mamba_dt_rank": 40,
        "use_mamba_kernels": False,
    },
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
}
"""By model type: fields of its configuration."""
