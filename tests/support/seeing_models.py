"""Models of random weights that see images, each with its image processor, of types with nothing to choose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def _mistral3(tokenizer: Any) -> tuple[Any, Any]:
    names = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_special_tokens({"extra_special_tokens": names})
    tokenizer.chat_template = CHAT.replace("IMAGE", names[0])
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 112,
        "patch_size": 14,
    }
    config = Mistral3Config(
        text_config={"model_type": "mistral", **TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": 3},
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(names[0]),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        model = Mistral3ForConditionalGeneration._from_config(config, dtype=torch.float32)
    return model, PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})


def _internvl(tokenizer: Any) -> tuple[Any, Any]:
    names = ["<img>", "</img>", "<IMG_CONTEXT>"]
    tokenizer.add_special_tokens({"extra_special_tokens": names})
    tokenizer.chat_template = CHAT.replace("IMAGE", names[2])
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": 3},
        vision_config={**TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=tokenizer.convert_tokens_to_ids(names[2]),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        model = InternVLForConditionalGeneration._from_config(config, dtype=torch.float32)
    return model, GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, max_patches=4)


def _glm(kind: str, tokenizer: Any) -> tuple[Any, Any]:
    names = ["<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": names})
    start, end, image, video = tokenizer.convert_tokens_to_ids(names)
    tokenizer.chat_template = CHAT.replace("IMAGE", "".join((names[0], names[2], names[1])))
    experts = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text = {
        **TEXT,
        **(experts if kind == "glm4v_moe" else {}),
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        | {"partial_rotary_factor": 0.5},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "image_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
    }
    config = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        image_start_token_id=start,
        image_end_token_id=end,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    images = Glm46VImageProcessorPil if kind == "glm46v" else Glm4vImageProcessorPil
    return model, images(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 24 * 2})


def _qwen3(kind: str, tokenizer: Any) -> tuple[Any, Any]:
    """Qwen3.5 has layers with states, Qwen3-VL adds to states behind some."""
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": names})
    start, end, image, video = tokenizer.convert_tokens_to_ids(names)
    tokenizer.chat_template = CHAT.replace("IMAGE", "".join((names[0], names[2], names[1])))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    delta = {name: 2 if name.endswith("heads") else 16 for name in DELTA}
    hybrid = {"layer_types": ["linear_attention", "full_attention"] * 2, "shared_expert_intermediate_size": 24} | delta
    turned = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    text = {
        **TEXT,
        **(experts if kind.endswith("moe") else {}),
        **(hybrid if kind.startswith("qwen3_5") else {}),
        "vocab_size": len(tokenizer),
        # Of one type features are added behind the last layer too.
        "num_hidden_layers": 2 if kind == "qwen3_vl_moe" else 4,
        "head_dim": 16,
        "rope_parameters": turned,
    }
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
    config = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision
        | {"patch_size": 14, "num_position_embeddings": 64}
        | ({} if kind.startswith("qwen3_5") else {"deepstack_visual_indexes": [0, 1]}),
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return model, Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 24)


def _llava(kind: str, tokenizer: Any) -> tuple[Any, Any]:
    names = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_special_tokens({"extra_special_tokens": names})
    tokenizer.chat_template = CHAT.replace("IMAGE", names[0])
    clip = {"model_type": "clip_vision_model", "projection_dim": 32, "image_size": 56}
    pixtral = {"model_type": "pixtral", "head_dim": 16, "image_size": 112}
    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": 3},
        vision_config={**TOWER, "patch_size": 14, **(clip if kind == "llava" else pixtral)},
        vision_feature_layer=-2 if kind == "llava" else -1,
        vision_feature_select_strategy="default" if kind == "llava" else "full",
        image_token_index=tokenizer.convert_tokens_to_ids(names[0]),
    )
    with torch.random.fork_rng():
        model = LlavaForConditionalGeneration._from_config(config, dtype=torch.float32)
    if kind == "llava":
        return model, LlavaImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return model, PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28})


def _tiled(kind: str, tokenizer: Any) -> tuple[Any, Any]:
    numbered = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    names = ["<image>", "<fake_token_around_image>", "<global-img>", *numbered]
    tokenizer.add_special_tokens({"extra_special_tokens": names})
    tokenizer.chat_template = CHAT.replace("IMAGE", names[0])
    config = AutoConfig.for_model(
        kind,
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": 3},
        vision_config={**TOWER, "image_size": 56, "patch_size": 14},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(names[0]),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    images = Idefics3ImageProcessorPil if kind == "idefics3" else SmolVLMImageProcessorPil
    return model, images(size={"longest_edge": 168}, max_image_size={"longest_edge": 56})


MADE: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "mistral3": _mistral3,
    "internvl": _internvl,
    **{kind: partial(_llava, kind) for kind in ("llava", "llava, Pixtral")},
    **{kind: partial(_qwen3, kind) for kind in ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")},
    **{kind: partial(_tiled, kind) for kind in ("idefics3", "smolvlm")},
    **{kind: partial(_glm, kind) for kind in ("glm46v", "glm4v", "glm4v_moe")},
}
"""Kinds with nothing to choose -> model and image processor, for a tokenizer that they add to."""
