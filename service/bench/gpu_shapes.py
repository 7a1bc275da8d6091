"""Shapes of the models with random weights that `slipstream bench gpu` measures."""

from __future__ import annotations

from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    # Llama 3 8B.
    "8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    },
}
DTYPES = {"8b": torch.bfloat16, "tiny": torch.float32}
