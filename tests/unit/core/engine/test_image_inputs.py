"""Images on their way into a prompt: bounds of their number and of the memory for their pixels."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from core.engine import image_inputs
from core.engine.image_inputs import ImageInputs
from core.errors import InvalidRequest, Overloaded
from core.types.chat import ChatMessage
from core.types.image import BLIND, MAX_IMAGES, NO_IMAGES, ReadImage
from core.types.io import GenerateRequest

PIXELS = 300


class Sized:
    """A processor that makes PIXELS floats of every image."""

    def read(self, data: Any, field: str) -> ReadImage:
        return ReadImage(np.zeros(PIXELS, np.float32), None, 1)


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageInputs]:
    monkeypatch.setattr(image_inputs, "read_image", lambda data, field: data)
    found = ImageInputs(Sized(), object())  # type: ignore[arg-type]
    yield found
    found.close()


async def test_numbers_and_bytes_are_bounded(inputs: ImageInputs) -> None:
    assert await inputs.read(GenerateRequest(text="a")) == ()
    assert len(await inputs.read(GenerateRequest(text="a", images=(b"x",) * MAX_IMAGES))) == MAX_IMAGES
    many = ChatMessage("user", "", parts=("a", *[b"x"] * 17))
    for request, field in (
        (GenerateRequest(chat=(many,)), "chat.messages[0].parts[17]"),
        (GenerateRequest(text="a", images=(b"x", b"")), "images[1]"),
        (GenerateRequest(text="a", images=(bytes(image_inputs.MAX_IMAGE_BYTES + 1),)), "images[0]"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await inputs.read(request)
        assert [each.field for each in refused.value.violations] == [field]


async def test_without_a_processor_images_are_refused() -> None:
    blind = ImageInputs()
    assert not blind.sees and await blind.read(GenerateRequest(text="a")) == ()
    with pytest.raises(InvalidRequest, match=BLIND):
        await blind.read(GenerateRequest(text="a", images=(b"x",)))
    assert blind.expanded("a", ()) == "a" and blind.placed(np.array([1]), ()) is NO_IMAGES
    blind.close()


async def fit(inputs: ImageInputs, count: int) -> bool:
    gc.collect()
    try:
        return len(await inputs.read(GenerateRequest(text="a", images=(b"x",) * count))) == count
    except Overloaded:
        return False


async def test_pixels_of_live_requests_are_bounded_and_given_back(
    inputs: ImageInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_inputs, "HELD_BYTES", 3 * 4 * PIXELS)
    kept = await inputs.read(GenerateRequest(text="a", images=(b"x", b"y")))
    with pytest.raises(Overloaded, match="all the memory"):
        await inputs.read(GenerateRequest(text="a", images=(b"x", b"y")))
    assert await fit(inputs, 1), "what was refused holds nothing"
    del kept
    assert await fit(inputs, 3)
