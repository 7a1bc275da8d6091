"""Tiny random checkpoints with a tokenizer, saved as a real model directory: what tests load instead of a download.

Weights are drawn so that greedy text wanders (no token repeated for ever) and the best two logits stay well apart, so a
test may demand equal argmax from two ways of computing the same thing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

VOCAB_SIZE = 320
CONTEXT_LENGTH = 1024
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

_PANGRAMS = (
    "the quick brown fox jumps over the lazy dog. ",
    "pack my box with five dozen liquor jugs and the jugs with the liquor. ",
    "a token is a token until the stream that carries the token ends. ",
)

_GQA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH,
}

_OF_HEADS = ("intermediate_size", "num_key_value_heads", "head_dim")
_MHA = {name: size for name, size in _GQA.items() if name not in _OF_HEADS}
_GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_LENGTH}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_GQA},
    "qwen2": {**_GQA, "tie_word_embeddings": True},
    "qwen3": {**_GQA, "tie_word_embeddings": True},
    "mistral": {**_GQA, "num_key_value_heads": 1, "sliding_window": 16},
    "gemma3_text": {
        **_GQA,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
    },
    "qwen3_moe": {**_GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {
        **_GQA,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": CONTEXT_LENGTH / 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 150000.0,
        },
    },
    "gemma2": {**_GQA, "sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "bitnet": _GQA,  # It norms what its second products read: transformers computes it.
    "gemma4_text": {
        **_GQA,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 16,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "deepseek_v3": {
        **{name: value for name, value in _GQA.items() if name != "head_dim"},
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "deepseek_v2": {
        **{name: value for name, value in _GQA.items() if name != "head_dim"},
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "mixtral": {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {
        **_GQA,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "logit_scale": 1.0,
    },
    "llama4_text": {
        **_GQA,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "attention_chunk_size": 16,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "gpt2": _GPT,
    "gptj": {**_GPT, "rotary_dim": 8},
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 96, "n_layer": 2, "n_head": 6, "seq_length": CONTEXT_LENGTH},
    "falcon": _MHA,
    "gpt_neo": {
        **{name: size for name, size in _MHA.items() if not name.startswith("num_")},
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 16,
    },
    "mpt": {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT_LENGTH},
}
"""Kinds that the engine serves. Windows are short enough to bite in a short test.

The first seven stand for the families people run; the others have what those lack: capped scores, layers that share
their KV, values narrower than keys, chunked attention, learned positions, rotated pairs, attention of their own.
"""

_MAMBA2: dict[str, Any] = {
    **_GQA,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}

_MAMBA_1 = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 8,
    "time_step_rank": 4,
    "use_mambapy": False,
    "max_position_embeddings": CONTEXT_LENGTH,
}

RECURRENT_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_GQA,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "nemotron_h": {
        **{name: value for name, value in _GQA.items() if name != "num_hidden_layers"},
        "layers_block_type": ["mamba", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "lfm2": {**_GQA, "layer_types": ["conv", "full_attention"]},
    "mamba2": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "state_size": 16,
        "chunk_size": 8,
        "max_position_embeddings": CONTEXT_LENGTH,
    },
    "jamba": {
        **_GQA,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "mamba": _MAMBA_1,
    "falcon_mamba": _MAMBA_1,
}
"""Kinds with recurrent state, alone or beside attention."""

REFUSED_CONFIGS: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": True},
    "gpt_neox_japanese": _MHA,
    "xglm": {"vocab_size": VOCAB_SIZE, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
}
"""Kinds that transformers runs and the engine must refuse: attention of their own."""


HEADED_CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **_GQA,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""Of models with heads for multi-token prediction, beside `deepseek_v3`."""


def make_checkpoint(kind: str, directory: Path | str, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of `kind` with its tokenizer to `directory` and return that; equal seeds give equal weights.

    `overrides` replace entries of the model configuration, e.g. `max_position_embeddings=64`.
    """
    transformers_logging.disable_progress_bar()
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    ids = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    known = REFUSED_CONFIGS | CONFIGS | RECURRENT_CONFIGS | HEADED_CONFIGS
    config = AutoConfig.for_model(kind, **{**known.get(kind, {}), **ids, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_of(config).from_config(config, dtype=torch.float32)
    _draw_weights(model, seed)
    model.save_pretrained(path)
    tokenizer_of_tests().save_pretrained(path)
    return path


def auto_of(config: PreTrainedConfig) -> Any:
    """What makes a model of `config`: one that also sees is no causal language model, for most types."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


LAST_NORMS = ("model.norm.weight", "transformer.ln_f.weight", "transformer.norm_f.weight", "biogpt.layer_norm.weight")


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every parameter: matrices get a wide normal, vectors keep their start plus a little noise.

    Embeddings are small beside what the layers add, else a tied output matrix answers every token with itself; the last
    norm makes up for it, so that logits keep a standard deviation of two to three.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        noise = torch.empty_like(parameter).normal_(generator=generator)
        if "sinks" in name:
            parameter.copy_(noise)
        elif parameter.dim() == 1:
            parameter.add_(noise, alpha=0.1)
            if "q_norm" in name or "k_norm" in name:
                parameter.add_(0.7)
            if "q_norm" in name and model.config.model_type.startswith("gemma4"):
                parameter.mul_(len(parameter) ** -0.5)  # It scales no scores: the norm does.
            if tied and name in LAST_NORMS:
                parameter.add_(9.0)
            if "embeddings_layernorm" in name:
                parameter.mul_(0.03)
        elif any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
            parameter.copy_(noise.mul_(0.03 if tied else 0.3))
        else:
            parameter.copy_(noise.mul_(0.2))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(torch.empty_like(buffer).uniform_(0.5, 1.5, generator=generator))


@cache
def tokenizer_of_tests() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges; any UTF-8 text round-trips, every id below `VOCAB_SIZE` decodes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        _PANGRAMS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            min_frequency=1,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    assert core.get_vocab_size() == VOCAB_SIZE, core.get_vocab_size()
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
