"""No image that a processor lets through fails in the step that looks at it: that would end all streams."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from core.config import ModelConfig
from core.errors import InvalidRequest
from core.models.loader import load_model
from core.models.vision.families import VISION_FAMILIES
from core.text.images.placing import ImagePlacer
from core.text.images.processor import ImageProcessor, in_rows
from core.text.tokenizer import Tokenizer
from tests.support.vision_checkpoints import FURTHER, KINDS, make_vision_checkpoint
from tests.unit.core.models.reference import CPU

EXTREMES = ((1, 1), (7, 5), (57, 13), (3, 2000), (2000, 3), (16384, 1), (1, 16384))
LARGE = 3000
"""Tokens of an image that is left out here: it takes seconds."""


@pytest.mark.parametrize("kind", [*KINDS, *FURTHER])
def test_images_of_any_size_are_seen_or_refused(kind: str, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    directory = make_vision_checkpoint(kind, tmp_path / "model")
    model = load_model(ModelConfig(str(directory), dtype="float32", native="off"), CPU)
    assert model.spec.vision is not None
    tower, vision = model.tower, model.spec.vision  # type: ignore[attr-defined]
    own = ImagePlacer(vision, Tokenizer.load(directory)).own if vision.tiles is not None else in_rows
    processor = ImageProcessor.load(directory, vision, own)
    seen = 0
    for size in (*EXTREMES, *((rng.randint(1, 150), rng.randint(1, 150)) for _ in range(12))):
        try:
            image = processor.read(Image.new("RGB", size, "red"), "images[0]")
        except InvalidRequest as error:
            assert "images[0]" in str(error)
            continue
        assert image.length > 0, size
        if image.length < LARGE:
            assert not tower.misfit(image), size
            seen += 1
    assert seen >= 8


@pytest.mark.parametrize(
    ("eye", "strategy", "length"),
    [
        ("clip_vision_model", "default", 16),
        ("clip_vision_model", "full", 17),
        ("siglip_vision_model", "full", 16),
        ("siglip_vision_model", "default", 15),
    ],
)
def test_clip_has_a_token_for_the_whole_of_an_image(eye: str, strategy: str, length: int) -> None:
    seeing = SimpleNamespace(model_type=eye, image_size=56, patch_size=14)
    config = SimpleNamespace(image_token_id=7, vision_config=seeing, vision_feature_select_strategy=strategy)
    assert VISION_FAMILIES["llava"].spec(config).length == length
