"""All images of a request together have a bound of pixels: few bytes may be many of them, and each takes time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from core.engine import image_inputs
from core.engine.image_inputs import REQUEST_PIXELS, ImageInputs
from core.errors import InvalidRequest
from core.text.images.reading import MAX_PIXELS
from core.types.image import ReadImage
from core.types.io import GenerateRequest
from tests.support.vision_checkpoints import picture

BOUND = 2 * 30 * 20 + 5


class Small:
    """A processor that makes a few numbers of every image."""

    def __init__(self) -> None:
        self.read_sizes = list[tuple[int, int]]()

    def read(self, image: Any, field: str) -> ReadImage:
        self.read_sizes.append(image.size)
        return ReadImage(np.zeros(3, np.float32), None, 1)


@pytest.fixture
def processor() -> Small:
    return Small()


@pytest.fixture
def inputs(processor: Small, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageInputs]:
    monkeypatch.setattr(image_inputs, "REQUEST_PIXELS", BOUND)
    found = ImageInputs(processor, object())  # type: ignore[arg-type]
    yield found
    found.close()


def sent(*sizes: tuple[int, int]) -> GenerateRequest:
    return GenerateRequest(text="a", images=tuple(picture(place, *size) for place, size in enumerate(sizes)))


async def test_the_image_that_passes_the_bound_is_named_and_not_decoded(inputs: ImageInputs, processor: Small) -> None:
    assert len(await inputs.read(sent((30, 20), (30, 20), (5, 1)))) == 3
    processor.read_sizes.clear()
    with pytest.raises(InvalidRequest) as refused:
        await inputs.read(sent((30, 20), (20, 30), (6, 1), (1, 1)))
    (violation,) = refused.value.violations
    assert violation.field == "images[2]"
    assert violation.description == "has 6 x 1 pixels, and the images before it leave 5 for the request"
    assert processor.read_sizes == [(30, 20), (20, 30)]
    assert len(await inputs.read(sent((30, 20)))) == 1, "another request has its own"


def test_several_photos_of_cameras_are_served() -> None:
    assert MAX_PIXELS <= REQUEST_PIXELS and REQUEST_PIXELS >= 5 * 24_000_000
