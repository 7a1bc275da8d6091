"""Images of requests on their way into a prompt: decoded and processed off the loop, within bounds."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from core.engine.workers import Workers
from core.errors import InvalidRequest, Overloaded
from core.text.images.placing import ImagePlacer
from core.text.images.processor import ImageProcessor
from core.text.images.reading import MAX_PIXELS, read_image
from core.types.arrays import Ints
from core.types.image import BLIND, MAX_IMAGES, NO_IMAGES, PromptImages, ReadImage
from core.types.io import GenerateRequest, SentImage

MAX_IMAGE_BYTES: Final = 20 << 20
"""Bytes of one image as it is sent."""
REQUEST_PIXELS: Final = 4 * MAX_PIXELS
"""Of all images of a request, as they are sent: 100 KB of PNG may be 33 million, which take a second and more."""
HELD_BYTES: Final = 1 << 30
"""Bytes of pixels of all live requests. A request keeps them to its end: it may be retracted and computed again."""
WAITING_BYTES: Final = 256 << 20
"""Bytes of encoded images of all requests whose images are not read to the end."""
SHARE: Final = 3
"""A tenant may hold so many times what is left for others: alone three quarters, and newcomers always find some
(dynamic thresholds: Choudhury and Hahne 1998)."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """`tokens`: of one image. `prompt`: of all of a prompt."""

    tokens: int
    prompt: int


class TenantBytes:
    """Bytes that tenants share, none of whom can have them all."""

    def __init__(self) -> None:
        self._total = 0
        self._own = Counter[str]()

    def __bool__(self) -> bool:
        return self._total > 0

    def has_room(self, tenant: str, size: int, most: int) -> bool:
        """Whether `tenant` may hold `size` bytes more where all together may hold `most`."""
        return self._own[tenant] + size <= SHARE * (most - self._total - size)

    def take(self, tenant: str, size: int) -> None:
        """`tenant` holds `size` bytes more."""
        self._total += size
        self._own[tenant] += size

    def give(self, tenant: str, size: int) -> None:
        """`tenant` holds `size` bytes less."""
        self._total -= size
        self._own[tenant] -= size
        if not self._own[tenant]:
            del self._own[tenant]


class ImageInputs:
    """Reads and places images for one engine. Event-loop thread only."""

    def __init__(
        self,
        processor: ImageProcessor | None = None,
        placer: ImagePlacer | None = None,
        limits: ImageLimits | None = None,
        why: str = BLIND,
    ) -> None:
        """Without a processor and a placer, images are refused. `why`: what is said then."""
        self._why = why
        self._processor = processor
        self._placer = placer
        self._limits = limits or ImageLimits(1 << 62, 1 << 62)
        self._workers = Workers(1, "slipstream-image")
        self._held, self._waiting = TenantBytes(), TenantBytes()
        self._freed: deque[tuple[str, int]] = deque()
        """Tenants and bytes of images that were given up since `_held` was counted."""

    @property
    def sees(self) -> bool:
        """Whether images can be served."""
        return self._processor is not None

    async def read(self, request: GenerateRequest) -> tuple[ReadImage, ...]:
        """The images of `request`, in order.

        Raises InvalidRequest naming the image, and Overloaded while those of other requests take the memory for them.
        """
        sent = request.sent_images
        if not sent:
            return ()
        self._refuse_unreadable(sent)
        size = sum(len(each.data) for each in sent)
        if self._waiting and not self._waiting.has_room(request.tenant, size, WAITING_BYTES):
            raise Overloaded("too many images of other requests wait to be read", reason="IMAGES")
        self._waiting.take(request.tenant, size)
        try:
            return await self._read_all(sent, request.tenant)
        finally:
            self._waiting.give(request.tenant, size)

    def _refuse_unreadable(self, sent: Sequence[SentImage]) -> None:
        if self._processor is None:
            raise InvalidRequest.of(sent[0].field, self._why)
        if len(sent) > MAX_IMAGES:
            raise InvalidRequest.of(sent[MAX_IMAGES].field, f"is one of {len(sent)} images, at most {MAX_IMAGES}")
        for each in sent:
            if not 1 <= len(each.data) <= MAX_IMAGE_BYTES:
                raise InvalidRequest.of(each.field, f"must have 1 to {MAX_IMAGE_BYTES} bytes")

    async def _read_all(self, sent: Sequence[SentImage], tenant: str) -> tuple[ReadImage, ...]:
        found: list[ReadImage] = []
        tokens = size = pixels = 0
        for each in sent:
            # A turn for each: others need not wait for all sixteen.
            image, came = await self._workers.run(self._read, each, REQUEST_PIXELS - pixels, caller=tenant)
            pixels += came
            tokens, size = tokens + image.length, size + image.pixels.nbytes
            # Refused for good is what would not fit beside no other image either.
            if tokens > self._limits.prompt or not TenantBytes().has_room(tenant, size, HELD_BYTES):
                said = f"makes {tokens} tokens and {size >> 20} MiB of the images so far, more than can be served"
                raise InvalidRequest.of(each.field, said)
            self._hold(image, tenant)
            found.append(image)
        return tuple(found)

    def expanded(self, text: str, images: Sequence[ReadImage], field: str) -> str:
        """`text` with a run of tokens in the place of each image. Raises InvalidRequest with `field`."""
        if not images:
            return text
        assert self._placer is not None, "they were read"
        return self._placer.expanded(text, images, field)

    def placed(self, ids: Ints, images: Sequence[ReadImage], field: str) -> PromptImages:
        """Where `images` are in the prompt `ids`, int64[n]. Raises InvalidRequest with `field`."""
        if not images:
            return NO_IMAGES
        assert self._placer is not None, "they were read"
        return self._placer.placed(ids, images, field)

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._workers.close()

    def _read(self, sent: SentImage, most_pixels: int) -> tuple[ReadImage, int]:
        """The image, and how many pixels it had before it was resized."""
        assert self._processor is not None, "asked for above"
        image = read_image(sent.data, sent.field, most_pixels)
        found = self._processor.read(image, sent.field)
        if found.length > self._limits.tokens:
            said = f"becomes {found.length} tokens, at most {self._limits.tokens} can be served; make it smaller"
            raise InvalidRequest.of(sent.field, said)
        # Hashed here: the scheduler asks for it on the loop.
        assert len(found.keys) == found.length
        return found, image.width * image.height

    def _hold(self, image: ReadImage, tenant: str) -> None:
        size = image.pixels.nbytes
        while self._freed:
            self._held.give(*self._freed.popleft())
        if not self._held.has_room(tenant, size, HELD_BYTES):
            raise Overloaded("images of other requests take the memory there is for them", reason="IMAGES")
        self._held.take(tenant, size)
        # Called on whatever thread gives it up last, and appending is all of one piece.
        weakref.finalize(image, self._freed.append, (tenant, size))
