"""Images of requests on their way into a prompt: decoded and processed off the loop, within bounds."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

from core.engine.workers import Workers
from core.errors import InvalidRequest, Overloaded
from core.text.images.placing import ImagePlacer
from core.text.images.processor import ImageProcessor
from core.text.images.reading import read_image
from core.types.arrays import Ints
from core.types.image import BLIND, MAX_IMAGES, NO_IMAGES, PromptImages, ReadImage
from core.types.io import GenerateRequest, SentImage

MAX_IMAGE_BYTES: Final = 20 << 20
"""Bytes of one image as it is sent."""
HELD_BYTES: Final = 1 << 30
"""Bytes of pixels of all live requests. A request keeps them to its end: it may be retracted and computed again."""


class ImageInputs:
    """Reads and places images for one engine. Event-loop thread only."""

    def __init__(
        self, processor: ImageProcessor | None = None, placer: ImagePlacer | None = None, why: str = BLIND
    ) -> None:
        """Without both, images are refused. `why`: what is said then."""
        self._why = why
        self._processor = processor
        self._placer = placer
        self._workers = Workers(1, "slipstream-image")
        self._held = 0

    @property
    def sees(self) -> bool:
        """Whether images can be served."""
        return self._processor is not None

    async def read(self, request: GenerateRequest) -> tuple[ReadImage, ...]:
        """The images of `request`, in order.

        Raises InvalidRequest naming the image, and Overloaded while those of other requests take all memory for them.
        """
        sent = request.sent_images
        if not sent:
            return ()
        if self._processor is None:
            raise InvalidRequest.of(sent[0].field, self._why)
        if len(sent) > MAX_IMAGES:
            raise InvalidRequest.of(sent[MAX_IMAGES].field, f"is one of {len(sent)} images, at most {MAX_IMAGES}")
        for each in sent:
            if not 1 <= len(each.data) <= MAX_IMAGE_BYTES:
                raise InvalidRequest.of(each.field, f"must have 1 to {MAX_IMAGE_BYTES} bytes")
        found: list[ReadImage] = []
        for each in sent:
            # A turn for each: others need not wait for all sixteen.
            image = await self._workers.run(self._read, each, caller=request.tenant)
            self._hold(image)
            found.append(image)
        return tuple(found)

    def expanded(self, text: str, images: Sequence[ReadImage]) -> str:
        """`text` with a run of tokens in the place of each image. Raises InvalidRequest, field `images`."""
        if not images:
            return text
        assert self._placer is not None, "they were read"
        return self._placer.expanded(text, images, "images")

    def placed(self, ids: Ints, images: Sequence[ReadImage]) -> PromptImages:
        """Where `images` are in the prompt `ids`, int64[n]. Raises InvalidRequest, field `images`."""
        if not images:
            return NO_IMAGES
        assert self._placer is not None, "they were read"
        return self._placer.placed(ids, images, "images")

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._workers.close()

    def _read(self, sent: SentImage) -> ReadImage:
        assert self._processor is not None, "asked for above"
        return self._processor.read(read_image(sent.data, sent.field), sent.field)

    def _hold(self, image: ReadImage) -> None:
        size = image.pixels.nbytes
        if self._held + size > HELD_BYTES:
            raise Overloaded("images of other requests take all the memory there is for them", reason="IMAGES")
        self._held += size
        weakref.finalize(image, self._let_go, size)

    def _let_go(self, size: int) -> None:
        self._held -= size
