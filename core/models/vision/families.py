"""Model types that see images, and how each of them does: what stands for an image, and what its tower makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from core.types.image import ReadImage
from core.types.vision_spec import VisionSpec

TOWERS: Final = frozenset({"vision_tower", "visual", "multi_modal_projector"})
"""Names of the parts of such models that see, and read no tokens."""


class VisionFamily(Protocol):
    """One way to see. `config`: of the whole checkpoint, as `transformers` reads it."""

    @property
    def text(self) -> str:
        """The family of `core.models.native.families` that what reads tokens is of."""
        ...

    def spec(self, config: Any) -> VisionSpec:
        """The facts that the text side and the scheduler need."""
        ...

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        """[n, hidden]: embeddings of the tokens of `image`, whose pixels are on the device of `model`."""
        ...


@dataclass(frozen=True)
class Gemma3:
    """All images have one size and one number of tokens, which see each other in both directions."""

    text: str = "gemma3_text"

    def spec(self, config: Any) -> VisionSpec:
        """See `VisionFamily`."""
        return VisionSpec(
            image_token=config.image_token_id,
            begin_token=config.boi_token_index,
            end_token=config.eoi_token_index,
            around="\n\n",
            length=config.mm_tokens_per_image,
            both_ways=True,
        )

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        """See `VisionFamily`."""
        found: torch.Tensor = model.get_image_features(pixels, return_dict=True).pooler_output
        return found.flatten(0, 1)


@dataclass(frozen=True)
class QwenVL:
    """Images of any size, whose tokens have places in time, height and width (Qwen2-VL, Qwen2.5-VL)."""

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


VISION_FAMILIES: Final[Mapping[str, VisionFamily]] = {
    "gemma3": Gemma3(),
    "qwen2_vl": QwenVL(),
    "qwen2_5_vl": QwenVL(),
}
