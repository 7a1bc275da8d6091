"""Whisper checkpoints of random weights, and sounds to let them hear."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.support.checkpoints import _draw_weights, tokenizer_of_tests

RATE = 16_000
NAMES = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>")


def make_speech_checkpoint(directory: Path, *, languages: bool = True, seed: int = 0, **shape: Any) -> Path:
    """Write a model that hears one second at a time to `directory` and return that."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer_of_tests().save_pretrained(directory)
    tokenizer = type(tokenizer_of_tests()).from_pretrained(directory)
    tokenizer.add_special_tokens({"extra_special_tokens": list(NAMES)})
    start, en, de, transcribe, translate, no_times = tokenizer.convert_tokens_to_ids(list(NAMES))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": start}
    config = WhisperConfig(
        **{
            "vocab_size": len(tokenizer),
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "d_model": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_source_positions": 50,
            "max_target_positions": 64,
            **shape,
        },
        **ids,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    with torch.random.fork_rng():
        model = WhisperForConditionalGeneration._from_config(config, dtype=torch.float32)
    _draw_weights(model, seed)
    generation = GenerationConfig(**ids, max_length=64, suppress_tokens=[5, 6, 7], begin_suppress_tokens=[2, 45, 130])
    generation.is_multilingual = languages
    generation.no_timestamps_token_id = no_times
    if languages:
        generation.lang_to_id = {"<|en|>": en, "<|de|>": de}
        generation.task_to_id = {"transcribe": transcribe, "translate": translate}
    model.generation_config = generation
    model.save_pretrained(directory)
    extractor = WhisperFeatureExtractor(
        feature_size=config.num_mel_bins, chunk_length=config.max_source_positions // 50
    )
    extractor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def samples(seed: int, seconds: float = 1.0) -> np.ndarray:
    """int16[n]: noise that swells."""
    count = int(RATE * seconds)
    noise = np.random.default_rng(seed).normal(0, 0.3, count) * np.linspace(0.2, 1.0, count)
    return (noise.clip(-1, 1) * 32_767).astype(np.int16)


def wav(data: np.ndarray, rate: int = RATE) -> bytes:
    """A WAV file of samples [n] or [n, channels], of uint8, int16 or int32."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1 if data.ndim == 1 else data.shape[1])
        writer.setsampwidth(data.dtype.itemsize)
        writer.setframerate(rate)
        writer.writeframes(data.tobytes())
    return file.getvalue()
