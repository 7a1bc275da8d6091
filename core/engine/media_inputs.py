"""What reads images and sounds for a model that takes them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from core.config import EngineConfig
from core.engine.audio_inputs import AudioInputs
from core.engine.build_pools import Pools
from core.engine.image_inputs import ImageInputs, ImageLimits
from core.errors import ModelLoadError, StartupError
from core.models.base import ModelSpec
from core.text.audio.listener import Listener
from core.text.images.placing import ImagePlacer
from core.text.images.processor import ImageProcessor, in_rows
from core.text.tokenizer import Tokenizer
from core.types.image import ReadImage

logger = logging.getLogger(__name__)


class Sees(Protocol):
    """What looks at images in a model: `core.models.vision.tower.VisionTower`."""

    def misfit(self, image: ReadImage) -> str:
        """Why tokens and features of `image` do not fit; empty if they do."""
        ...


def image_inputs(
    config: EngineConfig, spec: ModelSpec, tokenizer: Tokenizer, pools: Pools, tower: Sees | None = None
) -> ImageInputs | None:
    """None for a model that sees none. One whose images cannot be read says why when it is sent one.

    `tower` looks at one that is blank.
    """
    if spec.vision is None or not config.model.path:
        return None
    try:
        placer = ImagePlacer(spec.vision, tokenizer)
        own = in_rows if spec.vision.tiles is None else placer.own
        processor = ImageProcessor.load(Path(config.model.path), spec.vision, own)
        if tower is not None and (misfit := tower.misfit(processor.read_blank())):
            raise ModelLoadError(f"the image processor of {config.model.path} is for another model: {misfit}")
    except StartupError as reason:
        logger.warning("images are refused: %s", reason)
        return ImageInputs(why=str(reason))
    limits = ImageLimits(config.model.max_image_tokens, pools.max_input_length)
    return ImageInputs(processor, placer, limits)


def audio_inputs(config: EngineConfig, spec: ModelSpec) -> AudioInputs | None:
    """None for a model that hears nothing. Raises ModelLoadError: a model that hears can do nothing else."""
    if spec.encoder is None or spec.encoder.audio is None:
        return None
    return AudioInputs(Listener.load(Path(config.model.path), spec.encoder.audio), spec.encoder.start_ids)
