"""Where images are in a prompt, and the positions that they give to tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.errors import InvalidRequest
from core.text.images.placing import ImagePlacer
from core.text.images.processor import in_rows
from core.types.image import FIRST_KEY, NO_IMAGES, PlacedImage, PromptImages, ReadImage
from core.types.vision_spec import VisionSpec

NAMES = {7: "<image>", 8: "<begin>", 9: "<end>"}
TOKENIZER: Any = SimpleNamespace(name_of=NAMES.__getitem__)
GEMMA = VisionSpec(image_token=7, begin_token=8, end_token=9, around=("\n\n", "\n\n"), length=2, both_ways=True)
QWEN = VisionSpec(image_token=7, begin_token=7, merge=2, places=True)


def image(length: int, value: float = 0.0, grid: tuple[int, int, int] | None = None, own: Any = None) -> ReadImage:
    return ReadImage(np.full((length, 3), value, np.float32), grid, length, None if own is None else np.array(own))


def test_a_place_in_a_text_becomes_a_run_of_tokens() -> None:
    gemma, qwen = ImagePlacer(GEMMA, TOKENIZER), ImagePlacer(QWEN, TOKENIZER)
    two, three = image(2), image(3)
    assert gemma.expanded("a<begin>b", [two], "images") == "a\n\n<begin><image><image><end>\n\nb"
    assert qwen.expanded("a<image>b<image>", [two, three], "images") == "a<image><image>b<image><image><image>"
    written = ImagePlacer(VisionSpec(image_token=7, begin_token=7, first_token=8, end_token=9, merge=2), TOKENIZER)
    assert written.expanded("a<image>b", [two], "images") == "a<begin><image><image><end>b"
    for text, images in (("ab", [two]), ("<image>", []), ("<image><image>", [two])):
        with pytest.raises(InvalidRequest, match=f"has {len(images)} images"):
            qwen.expanded(text, images, "images")


def test_each_image_has_a_run_of_its_length() -> None:
    placer = ImagePlacer(GEMMA, TOKENIZER)
    first, second = image(2), image(3)
    placed = placer.placed(np.array([1, 7, 7, 2, 7, 7, 7]), [first, second], "images").placed
    assert [(each.start, each.end, each.image) for each in placed] == [(1, 3, first), (4, 7, second)]
    assert placer.placed(np.array([7, 1]), [], "images") is NO_IMAGES, "a token that no image belongs to is a token"
    touching = placer.placed(np.array([7, 7, 7, 7, 7, 1]), [first, second], "images").placed
    assert [(each.start, each.image) for each in touching] == [(0, first), (2, second)], "runs that touch are one"
    for ids in ([1, 7, 2], [1, 7, 7, 7], [7, 7, 1, 7, 7], [1]):
        with pytest.raises(InvalidRequest, match="take runs of"):
            placer.placed(np.array(ids), [first], "images")


PIXTRAL = VisionSpec(image_token=7, begin_token=7, rows=("<break>", "<stop>"), side=28)
GRIDS = ((1, 2, 3), (1, 1, 2))


def test_rows_of_an_image_have_something_between_them() -> None:
    """Two rows of three, then one of two; 5 is between rows, 6 behind the last."""
    placer = ImagePlacer(PIXTRAL, TOKENIZER)
    first, second = (image(int(own[-1]) + 1, grid=grid, own=own) for grid, own in ((g, in_rows(g)) for g in GRIDS))
    assert placer.expanded("a<image>b", [first], "images") == f"a{'<image>' * 3}<break>{'<image>' * 3}<stop>b"
    ids = [1, 7, 7, 7, 5, 7, 7, 7, 6, 2, 7, 7, 6]
    placed = placer.placed(np.array(ids), [first, second], "images").placed
    assert [(each.start, each.end, each.image) for each in placed] == [(1, 8, first), (10, 12, second)]
    for wrong in (ids[:9], ids[:5], [1, 7, 7, 7, 5, 5, 7, 7, 7, 6, 7, 7], [7, 7, 5, 7, 7, 7, 6, 7, 7], [*ids, 7], []):
        with pytest.raises(InvalidRequest, match="take runs of"):
            placer.placed(np.array(wrong, np.int64), [first, second], "images")


def test_positions_count_rows_and_columns_of_an_image() -> None:
    """Two texts around an image of two rows by three, which takes as many positions as its longer side."""
    ids = np.array([1, 1, 7, 7, 7, 7, 7, 7, 1])
    found = ImagePlacer(QWEN, TOKENIZER).placed(ids, [image(6, grid=(1, 4, 6))], "images")
    assert found.places is not None and found.places.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert found.delta == -3
    behind = found.places_of(8, 11)
    assert behind is not None and behind.tolist() == [[5, 6, 7]] * 3
    late = found.places_of(10, 12)
    assert late is not None and late.tolist() == [[7, 8]] * 3
    assert PromptImages().places_of(0, 3) is None and PromptImages().delta == 0


def test_chunks_and_prefixes_end_within_no_image() -> None:
    images = PromptImages((PlacedImage(3, image(4)), PlacedImage(7, image(2)), PlacedImage(12, image(3))))
    assert [images.outside(tokens) for tokens in range(16)] == [0, 1, 2, 3, 3, 3, 3, 7, 7, 9, 10, 11, 12, 12, 12, 15]
    assert [images.cut(0, stop) for stop in (2, 3, 5, 8)] == [2, 3, 3, 7]
    assert [images.cut(3, stop) for stop in (4, 7, 8)] == [7, 7, 7], "an image is computed whole"
    assert images.cut(10, 13) == 12 and images.cut(12, 13) == 15
    assert images.within(3, 9) == images.placed[:2] and images.within(4, 15) == images.placed[1:]


def test_the_cache_knows_images_by_their_pixels() -> None:
    ids = np.array([5, 7, 7, 7, 6])
    one, same, other = (PromptImages((PlacedImage(1, image(3, value)),)) for value in (1.0, 1.0, 1.5))
    keys = one.keyed(ids)
    assert keys[[0, 4]].tolist() == [5, 6] and (keys[1:4] >= FIRST_KEY).all() and keys.max() < 2 * FIRST_KEY
    assert ids.tolist() == [5, 7, 7, 7, 6], "the ids of the prompt stay"
    assert np.array_equal(keys, same.keyed(ids)) and not (keys == other.keyed(ids))[1:4].any()
    assert np.array_equal(one.keyed(ids[:2]), keys[:2]) and NO_IMAGES.keyed(ids) is ids
    apart = PromptImages((PlacedImage(1, image(3, 1.0, own=[0, 2])),))
    shapes = {
        tuple(ReadImage(np.zeros(shape, np.float32), grid, 2).keys)
        for shape, grid in (((2, 6), None), ((6, 2), None), ((2, 6), (1, 2, 4)), ((2, 6), (1, 4, 2)))
    }
    assert len(shapes) == 4
    for between in (7, 8):
        ids[2] = between
        named = apart.keyed(ids)
        assert named[2] == between and (named[[1, 3]] >= FIRST_KEY).all(), "text between its tokens is text"
        assert np.array_equal(apart.keyed(ids[:3]), named[:3])
