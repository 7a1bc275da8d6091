"""Which models take images and sounds, and what is said where a checkpoint cannot be asked how."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from core.config import EngineConfig, ModelConfig
from core.engine import media_inputs
from core.engine.media_inputs import audio_inputs, image_inputs
from core.errors import ModelLoadError

MADE = EngineConfig(model=ModelConfig("somewhere"))


def test_models_that_neither_see_nor_hear_take_nothing() -> None:
    spec: Any = SimpleNamespace(vision=None, encoder=None)
    pools: Any = None
    assert image_inputs(MADE, spec, pools, pools) is None and audio_inputs(MADE, spec) is None
    spec = SimpleNamespace(vision=None, encoder=SimpleNamespace(audio=None))
    assert audio_inputs(MADE, spec) is None


def test_a_model_whose_images_cannot_be_read_is_served_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*_: Any) -> None:
        raise ModelLoadError("it has no preprocessor_config.json")

    monkeypatch.setattr(media_inputs.ImageProcessor, "load", load)
    monkeypatch.setattr(media_inputs, "ImagePlacer", lambda *_: None)
    spec: Any = SimpleNamespace(vision=SimpleNamespace(tiles=None))
    nothing: Any = None
    found = image_inputs(MADE, spec, nothing, nothing)
    assert found is not None and not found.sees
    assert caplog.messages == ["images are refused: it has no preprocessor_config.json"]


@pytest.mark.parametrize("misfit", ["", "an image has 2 tokens, and the vision tower makes 3 of it"])
def test_a_tower_looks_at_a_blank_image_first(misfit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = SimpleNamespace(read_blank=lambda: "blank")
    monkeypatch.setattr(media_inputs.ImageProcessor, "load", lambda *_: processor)
    monkeypatch.setattr(media_inputs, "ImagePlacer", lambda *_: None)
    shown = list[Any]()
    tower: Any = SimpleNamespace(misfit=lambda image: shown.append(image) or misfit)
    spec: Any = SimpleNamespace(vision=SimpleNamespace(tiles=None))
    pools: Any = SimpleNamespace(max_input_length=9)
    found = image_inputs(MADE, spec, pools, pools, tower)
    assert found is not None and found.sees is (not misfit) and shown == ["blank"]
