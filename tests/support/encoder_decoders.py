"""Tiny random encoder-decoder checkpoints with a tokenizer, as `tests.support.checkpoints` makes decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from tests.support.checkpoints import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, tokenizer_of_tests

MAX_INPUT = 256
"""Positions of encoder and decoder alike."""
LANGUAGE_ID = 7
"""What mBART is told to begin every output with."""

_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": MAX_INPUT,
    "decoder_start_token_id": EOS_ID,
    "forced_eos_token_id": EOS_ID,
}
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_ff": 48,
    "n_positions": MAX_INPUT,
    "decoder_start_token_id": PAD_ID,
}

ENCODER_DECODER_CONFIGS: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "mbart": {**_BART, "forced_bos_token_id": LANGUAGE_ID},
    "t5": _T5,
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "pegasus": _BART,
    "marian": _BART,
    "plbart": _BART,
    "blenderbot": _BART,
    "blenderbot-small": _BART,
}
"""Kinds that the engine serves."""


@torch.no_grad()
def make_encoder_decoder(
    kind: str, directory: Path | str, seed: int = 0, generation: dict[str, Any] | None = None, **overrides: Any
) -> Path:
    """Write a checkpoint of `kind` with its tokenizer to `directory` and return that; equal seeds give equal weights.

    `generation` adds to the generation configuration; `overrides` replace entries of the model configuration.
    """
    transformers_logging.disable_progress_bar()
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    ids = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "vocab_size": VOCAB_SIZE}
    given = {**ENCODER_DECODER_CONFIGS[kind], **ids, "tie_word_embeddings": False, **overrides}
    config = AutoConfig.for_model(kind, **given)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # What layers and positions add outweighs the embedding, else an output repeats one token for ever.
            wide = any(part in name for part in ("embed_positions", "attn", "fc1", "fc2"))
            alpha = 0.1 if parameter.dim() == 1 else 0.7 if wide else 0.35
            parameter.add_(torch.randn_like(parameter), alpha=alpha)
    forced = {name: value for name, value in given.items() if name.startswith(("forced_", "decoder_start"))}
    special = {name: value for name, value in ids.items() if name != "vocab_size"}
    model.generation_config = GenerationConfig(**special, **forced, **(generation or {}))
    model.save_pretrained(path)
    tokenizer_of_tests().save_pretrained(path)
    return path
