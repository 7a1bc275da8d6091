"""Checkpoints of random weights that see images, with their tokenizer and image processor, and images to show them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.checkpoints import _draw_weights, tokenizer_of_tests
from tests.support.seeing_models import CHAT, MADE, TEXT

KINDS = ("gemma3", "gemma4", "gemma4, both ways", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl")
"""Model type, and behind a comma what is other than in the case without it."""


FURTHER = (
    *("glm46v", "glm4v", "glm4v_moe", "idefics3", "internvl", "llava", "llava, Pixtral"),
    *("qwen3_5_moe", "qwen3_vl_moe", "smolvlm"),
)
"""Types that see as one of these does, but for their processor or their tower."""


def make_vision_checkpoint(kind: str, directory: Path, seed: int = 0, across: int = 4, **changed: Any) -> Path:
    """Write a checkpoint of one of KINDS to `directory` and return that. `changed`: entries of its configuration.

    `across`: patches that an image of Gemma 3 is wide and high.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer_of_tests().save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if kind == "gemma3":
        model, images = _gemma3(tokenizer, across)
    elif kind in MADE:
        model, images = MADE[kind](tokenizer)
    else:
        model, images = _gemma4(kind, tokenizer) if kind.startswith("gemma4") else _qwen(kind, tokenizer)
    _draw_weights(model, seed)
    model.save_pretrained(directory)
    images.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    return directory


def _gemma3(tokenizer: Any, across: int) -> tuple[Any, Any]:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer.add_special_tokens({"extra_special_tokens": list(names.values())})
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in names.items()}
    tokenizer.chat_template = CHAT.replace("IMAGE", names["boi_token"])
    config = Gemma3Config(
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 14 * across,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    images = Gemma3ImageProcessorPil(size={"height": 14 * across, "width": 14 * across}, image_seq_length=4)
    with torch.random.fork_rng():
        model = Gemma3ForConditionalGeneration._from_config(config, dtype=torch.float32)
    return model, images


def _gemma4(kind: str, tokenizer: Any) -> tuple[Any, Any]:
    """As the small ones, whose layers have inputs and share keys, or as the large ones, which see images both ways."""
    names = ["<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": names})
    begin, end, image, video, audio = tokenizer.convert_tokens_to_ids(names)
    tokenizer.chat_template = CHAT.replace("IMAGE", names[2])
    small = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    large = {"use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    text = {
        **TEXT,
        "vocab_size": len(tokenizer),
        "vocab_size_per_layer_input": len(tokenizer),
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **(small if kind == "gemma4" else {**large, **experts, "hidden_size_per_layer_input": 0}),
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 64,
    }
    hearing = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 16,
    }
    config = Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=hearing if kind == "gemma4" else None,
        boi_token_id=begin,
        eoi_token_id=end,
        image_token_id=image,
        video_token_id=video,
        audio_token_id=audio,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        model = Gemma4ForConditionalGeneration._from_config(config, dtype=torch.float32)
    return model, Gemma4ImageProcessorPil(max_soft_tokens=70)


def _qwen(kind: str, tokenizer: Any) -> tuple[Any, Any]:
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": names})
    start, end, image, video = tokenizer.convert_tokens_to_ids(names)
    tokenizer.chat_template = CHAT.replace("IMAGE", "".join((names[0], names[2], names[1])))
    text = {
        **TEXT,
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
    if kind == "qwen2_5_vl":
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
        vision |= {"window_size": 56, "tokens_per_second": 2}
    else:
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    config_class, model_class = {
        "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
        "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    }[kind]
    config = config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        bos_token_id=1,
        eos_token_id=2,
    )
    images = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 24)
    with torch.random.fork_rng():
        model = model_class._from_config(config, dtype=torch.float32)
    return model, images


def picture(seed: int, width: int = 60, height: int = 60, kind: str = "PNG") -> bytes:
    """An encoded image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, kind)
    return data.getvalue()
