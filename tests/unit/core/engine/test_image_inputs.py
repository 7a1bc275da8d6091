"""Images on their way into a prompt: bounds of their number and of the memory for their pixels."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.engine import image_inputs
from core.engine.image_inputs import ImageInputs, ImageLimits
from core.errors import InvalidRequest, Overloaded
from core.types.chat import ChatMessage
from core.types.image import BLIND, MAX_IMAGES, NO_IMAGES, ReadImage
from core.types.io import GenerateRequest

PIXELS = 300


def shown(data: bytes, field: str, most_pixels: int) -> Any:
    """In the place of `read_image`."""
    return SimpleNamespace(width=3, height=2, data=data)


class Sized:
    """A processor that makes PIXELS floats of every image."""

    def read(self, data: Any, field: str) -> ReadImage:
        return ReadImage(np.zeros(PIXELS, np.float32), None, 1)


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageInputs]:
    monkeypatch.setattr(image_inputs, "read_image", shown)
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
    assert blind.expanded("a", (), "images") == "a" and blind.placed(np.array([1]), (), "images") is NO_IMAGES
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
    monkeypatch.setattr(image_inputs, "HELD_BYTES", 4 * 4 * PIXELS)
    kept = await inputs.read(GenerateRequest(text="a", images=(b"x", b"y")))
    with pytest.raises(Overloaded, match="take the memory"):
        await inputs.read(GenerateRequest(text="a", images=(b"x", b"y")))
    assert await fit(inputs, 1), "what was refused holds nothing"
    del kept
    assert await fit(inputs, 3)


async def taken(inputs: ImageInputs, tenant: str) -> tuple[ReadImage, ...]:
    """One image of `tenant`, if it has room for it."""
    try:
        return await inputs.read(GenerateRequest(text="a", images=(b"x",), tenant=tenant))
    except Overloaded:
        return ()


async def test_no_tenant_has_all_the_memory(inputs: ImageInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 64 images: three quarters are one tenant's at most, three quarters of the rest another's."""
    monkeypatch.setattr(image_inputs, "HELD_BYTES", 64 * 4 * PIXELS)
    kept = []
    for tenant, most in (("a", 48), ("b", 12), ("c", 3), ("a", 48)):
        if tenant == "a":
            # What was given up is the tenant's again.
            kept.clear()
            gc.collect()
        for count in range(most):
            kept.append(await taken(inputs, tenant))
            assert kept[-1], (tenant, count)
        assert not await taken(inputs, tenant)


async def test_what_can_never_fit_is_the_fault_of_the_request(
    inputs: ImageInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_inputs, "HELD_BYTES", 2 * 4 * PIXELS)
    with pytest.raises((InvalidRequest, Overloaded)) as refused:
        await inputs.read(GenerateRequest(text="a", images=(b"x", b"y")))
    assert isinstance(refused.value, InvalidRequest), "it is not told to come back"
    assert refused.match(r"images\[1\].*more than can be served")
    del refused
    assert await fit(inputs, 1)


@pytest.mark.parametrize(("limits", "field"), [((0, 9), "images[0]"), ((1, 2), "images[2]")])
async def test_tokens_of_images_are_bounded(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], field: str
) -> None:
    monkeypatch.setattr(image_inputs, "read_image", shown)
    inputs = ImageInputs(Sized(), object(), ImageLimits(*limits))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as refused:
        await inputs.read(GenerateRequest(text="a", images=(b"x",) * 3))
    assert [each.field for each in refused.value.violations] == [field]
    inputs.close()


class Slow(Sized):
    """Notes whose image it reads, and waits to be let go."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.go = threading.Event()

    def read(self, data: Any, field: str) -> ReadImage:
        self.seen.append(data.data)
        assert self.go.wait(20)
        return super().read(data, field)


async def test_callers_take_turns_and_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_inputs, "read_image", shown)
    monkeypatch.setattr(image_inputs, "WAITING_BYTES", 6)
    slow = Slow()
    inputs = ImageInputs(slow, object())  # type: ignore[arg-type]
    asked = [GenerateRequest(text="a", images=(b"a",), tenant="a") for _ in range(3)]
    asked.append(GenerateRequest(text="a", images=(b"b",), tenant="b"))
    reading = [asyncio.ensure_future(inputs.read(each)) for each in asked]
    await asyncio.sleep(0)
    more = asyncio.ensure_future(inputs.read(GenerateRequest(text="a", images=(b"cc",))))
    await asyncio.sleep(0)
    slow.go.set()
    found = await asyncio.gather(*reading)
    (refused,) = await asyncio.gather(more, return_exceptions=True)
    assert isinstance(refused, Overloaded) and "wait to be read" in refused.message
    assert slow.seen.index(b"b") <= 2, "the other caller's is not the last"
    assert all("keys" in vars(image) for images in found for image in images), "hashed where it was read"
    assert len(await inputs.read(GenerateRequest(text="a", images=(b"long one",)))) == 1, "alone it may be any"
    inputs.close()
