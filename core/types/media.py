"""What a prompt has beside its ids: images in it, or the sound that it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from core.types.arrays import Floats
from core.types.image import NO_IMAGES, PromptImages


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """`features`: float32[mels, frames], what the encoder hears."""

    images: PromptImages = NO_IMAGES
    features: Floats | None = None


NO_MEDIA: Final = PromptMedia()
