"""Model types that see images, and how each of them does: what stands for an image, and what its tower makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch

from core.types.image import ReadImage
from core.types.vision_spec import TileTexts, VisionSpec

TOWERS: Final = frozenset(
    {"vision_tower", "vision_model", "visual", "multi_modal_projector", "embed_vision", "connector"}
)
"""Names of the parts of such models that see, and read no tokens."""

PIXTRAL: Final = ("[IMG_BREAK]", "[IMG_END]")
"""What its processor writes behind each row of an image's tokens, and behind the last."""


class VisionFamily(Protocol):
    """One way to see. `config`: of the whole checkpoint, as `transformers` reads it."""

    @property
    def text(self) -> str:
        """The family of `core.models.native.families` that what reads tokens is of; empty if its own type says so."""
        ...

    def spec(self, config: Any) -> VisionSpec:
        """The facts that the text side and the scheduler need."""
        ...

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        """[n, hidden]: embeddings of the tokens of `image`, whose pixels are on the device of `model`.

        With [n, (1 + deep) hidden] what is added to their states behind each of the first layers stands beside them.
        """
        ...

    def beside(self, model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What `model` makes of `ids`, int64[T], by itself unless it is given embeddings: further arguments of it."""
        ...


class OnlyEmbeddings:
    """A family whose models read nothing but embeddings."""

    def beside(self, model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `VisionFamily`."""
        return {}


class OfOneSize(OnlyEmbeddings):
    """A family of which images, or their tiles, all have one size."""

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        """See `VisionFamily`."""
        found: torch.Tensor = model.get_image_features(pixels, return_dict=True).pooler_output
        return found.flatten(0, 1)


@dataclass(frozen=True)
class Gemma3(OfOneSize):
    """All images have one size and one number of tokens, which see each other in both directions."""

    text: str = "gemma3_text"

    def spec(self, config: Any) -> VisionSpec:
        """See `VisionFamily`."""
        return VisionSpec(
            image_token=config.image_token_id,
            begin_token=config.boi_token_index,
            end_token=config.eoi_token_index,
            around=("\n\n", "\n\n"),
            length=config.mm_tokens_per_image,
            both_ways=True,
        )


@dataclass(frozen=True)
class Gemma4:
    """Images of any size, whose tokens see each other in both directions in layers with windows, or nowhere."""

    text: str = "gemma4_text"

    def spec(self, config: Any) -> VisionSpec:
        """See `VisionFamily`."""
        both_ways = config.text_config.use_bidirectional_attention == "vision"
        return VisionSpec(
            image_token=config.image_token_id,
            begin_token=config.image_token_id,
            first_token=config.boi_token_id,
            end_token=config.eoi_token_id,
            merge=config.vision_config.pooling_kernel_size,
            most_patches=config.vision_config.position_embedding_size,
            both_ways=both_ways,
            in_windows=both_ways,
            filler=config.text_config.pad_token_id,
            filled=(config.image_token_id, config.video_token_id, config.audio_token_id),
        )

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        """See `VisionFamily`."""
        assert image.grid is not None
        rows, columns = torch.from_numpy(np.indices(image.grid[1:])).to(pixels.device).flatten(1)
        places = torch.stack((columns, rows), -1)[None]
        (found,) = model.get_image_features(pixels, places, return_dict=True).pooler_output
        features: torch.Tensor = found
        return features

    def beside(self, model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `VisionFamily`."""
        text = model.model.language_model
        return {"per_layer_inputs": text.get_per_layer_inputs(ids[None])} if text.hidden_size_per_layer_input else {}


@dataclass(frozen=True)
class QwenVL(OnlyEmbeddings):
    """Images of any size, whose tokens have places in time, height and width (Qwen2-VL, Qwen2.5-VL, GLM-4V)."""

    text: str = "qwen2"

    def spec(self, config: Any) -> VisionSpec:
        """See `VisionFamily`."""
        return VisionSpec(
            image_token=config.image_token_id,
            begin_token=config.image_token_id,
            merge=config.vision_config.spatial_merge_size,
            places=True,
        )

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        """See `VisionFamily`."""
        grid = torch.tensor([image.grid], device=pixels.device)
        (found,) = model.get_image_features(pixels, grid, return_dict=True).pooler_output
        features: torch.Tensor = found
        return features


@dataclass(frozen=True)
class Qwen3VL(QwenVL):
    """As `QwenVL`, with features of several depths (DeepStack, arXiv 2406.04334)."""

    text: str = "qwen3_vl_text"

    def spec(self, config: Any) -> VisionSpec:
        """See `VisionFamily`."""
        return replace(super().spec(config), deep=len(config.vision_config.deepstack_visual_indexes))

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        """See `VisionFamily`."""
        grid = torch.tensor([image.grid], device=pixels.device)
        found = model.get_image_features(pixels, grid, return_dict=True)
        return torch.cat([*found.pooler_output, *(each for (each,) in found.deepstack_features)], dim=-1)


@dataclass(frozen=True)
class InternVL(OfOneSize):
    """Images cut into tiles of one size, beside a small view of the whole (InternVL 1.5, arXiv 2404.16821)."""

    text: str = ""

    def spec(self, config: Any) -> VisionSpec:
        """See `VisionFamily`."""
        return VisionSpec(
            image_token=config.image_token_id,
            begin_token=config.image_token_id,
            around=("<img>", "</img>"),
            tile=config.image_seq_length,
        )


@dataclass(frozen=True)
class Idefics3(OnlyEmbeddings):
    """Images cut into tiles that a text numbers, and behind them a small view of the whole (arXiv 2408.12637)."""

    text: str = ""

    def spec(self, config: Any) -> VisionSpec:
        """See `VisionFamily`."""
        around, eye = "<fake_token_around_image>", config.vision_config
        return VisionSpec(
            image_token=config.image_token_id,
            begin_token=config.image_token_id,
            tile=(eye.image_size // eye.patch_size) ** 2 // config.scale_factor**2,
            tiles=TileTexts(
                tile=around + "<row_{row}_col_{column}>",
                row="\n",
                whole=f"\n{around}<global-img>",
                alone=f"{around}<global-img>",
                end=around,
            ),
        )

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        """See `VisionFamily`."""
        (found,) = model.get_image_features(pixels[None], return_dict=True).pooler_output
        features: torch.Tensor = found
        return features


@dataclass(frozen=True)
class Llava(OnlyEmbeddings):
    """All images have one size and one number of tokens, or, seen by Pixtral, rows as those of Mistral 3."""

    text: str = ""

    def spec(self, config: Any) -> VisionSpec:
        """See `VisionFamily`."""
        image, eye = config.image_token_id, config.vision_config
        if eye.model_type == "pixtral":
            return VisionSpec(image, image, rows=PIXTRAL, side=eye.patch_size)
        # CLIP has a token for the whole of an image in front, which the default is to leave out.
        more = (eye.model_type == "clip_vision_model") - (config.vision_feature_select_strategy == "default")
        return VisionSpec(image, image, length=(eye.image_size // eye.patch_size) ** 2 + more)

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        """See `VisionFamily`."""
        if image.grid is None:
            found: torch.Tensor = model.get_image_features(pixels, return_dict=True).pooler_output[0]
            return found
        # transformers' Mistral 3 takes the only row of a single token for a batch: beside a second image it does not.
        copies = 2 if image.length == 1 else 1
        sizes = torch.tensor([pixels.shape[-2:]] * copies)
        given = pixels.repeat(copies, 1, 1, 1)
        found, *_ = model.get_image_features(given, image_sizes=sizes, return_dict=True).pooler_output
        return found


@dataclass(frozen=True)
class Mistral3(Llava):
    """Images of any size, whose rows of tokens have a token between them (Pixtral, arXiv 2410.07073)."""

    def spec(self, config: Any) -> VisionSpec:
        """See `VisionFamily`."""
        return VisionSpec(
            image_token=config.image_token_id,
            begin_token=config.image_token_id,
            rows=PIXTRAL,
            side=config.vision_config.patch_size * config.spatial_merge_size,
        )


VISION_FAMILIES: Final[Mapping[str, VisionFamily]] = {
    "gemma3": Gemma3(),
    "gemma4": Gemma4(),
    "glm46v": QwenVL("glm4v_text"),
    "glm4v": QwenVL("glm4v_text"),
    "glm4v_moe": QwenVL("glm4v_moe_text"),
    "idefics3": Idefics3(),
    "internvl": InternVL(),
    "llava": Llava(),
    "mistral3": Mistral3(),
    "qwen2_vl": QwenVL(),
    "qwen2_5_vl": QwenVL(),
    "qwen3_5": QwenVL("qwen3_5_text"),
    "qwen3_5_moe": QwenVL("qwen3_5_moe_text"),
    "qwen3_vl": Qwen3VL(),
    "qwen3_vl_moe": Qwen3VL("qwen3_vl_moe_text"),
    "smolvlm": Idefics3(),
}
