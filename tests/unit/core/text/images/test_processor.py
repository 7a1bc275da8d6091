"""The checkpoint's own image processor: how many tokens an image becomes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from core.errors import ConfigError, InvalidRequest, ModelLoadError
from core.text.images import processor as module
from core.text.images.processor import ImageProcessor
from core.types.vision_spec import VisionSpec

QWEN = VisionSpec(image_token=7, begin_token=7, merge=2, places=True)
GEMMA = VisionSpec(image_token=7, begin_token=8, length=4)


def load(directory: Path, spec: VisionSpec) -> ImageProcessor:
    made = Gemma3ImageProcessorPil(size={"height": 56, "width": 56}, do_pan_and_scan=True)
    (made if spec is GEMMA else Qwen2VLImageProcessorPil(min_pixels=56 * 56)).save_pretrained(directory)
    return ImageProcessor.load(directory, spec)


@pytest.mark.parametrize(("size", "grid"), [((56, 56), (1, 4, 4)), ((112, 56), (1, 4, 8)), ((60, 200), (1, 14, 4))])
def test_patches_become_fewer_tokens(tmp_path: Path, size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    found = load(tmp_path, QWEN).read(Image.new("RGB", size, "red"), "images[0]")
    assert found.grid == grid and found.length == grid[1] * grid[2] // 4
    assert found.pixels.dtype == np.float32 and found.pixels.shape[0] == grid[1] * grid[2]


def test_images_of_one_size_have_as_many_tokens_and_no_crops(tmp_path: Path) -> None:
    found = load(tmp_path, GEMMA).read(Image.new("RGB", (900, 100), "red"), "images[0]")
    assert found.length == 4 and found.grid is None and found.pixels.shape == (1, 3, 56, 56)


@pytest.mark.parametrize(("size", "grid"), [((96, 96), (1, 24, 24)), ((200, 60), (1, 12, 45))])
def test_patches_that_fill_an_image_up_are_left_out(
    tmp_path: Path, size: tuple[int, int], grid: tuple[int, int, int]
) -> None:
    Gemma4ImageProcessorPil(max_soft_tokens=70).save_pretrained(tmp_path)
    found = ImageProcessor.load(tmp_path, VisionSpec(image_token=7, begin_token=7, merge=3)).read(
        Image.new("RGB", size, "red"), "images[0]"
    )
    assert found.grid == grid and found.length == grid[1] * grid[2] // 9
    assert found.pixels.shape == (1, grid[1] * grid[2], 768) and (found.pixels.max(axis=-1) == 1.0).all()


def test_a_token_has_the_side_that_the_model_says(tmp_path: Path) -> None:
    """Not that of a patch of the tower, which merges several."""
    PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}).save_pretrained(
        tmp_path
    )
    spec = VisionSpec(image_token=7, begin_token=7, rows=("b", "e"), side=28)
    found = ImageProcessor.load(tmp_path, spec).read(Image.new("RGB", (100, 60), "red"), "images[0]")
    assert found.grid == (1, 3, 4) and found.length == 14 and found.pixels.shape == (1, 3, 84, 112)


@pytest.mark.parametrize(("size", "tiles"), [((56, 56), 1), ((112, 56), 3), ((112, 112), 5)])
def test_tiles_and_a_view_of_the_whole_have_as_many_tokens(tmp_path: Path, size: tuple[int, int], tiles: int) -> None:
    GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, max_patches=4).save_pretrained(tmp_path)
    spec = VisionSpec(image_token=7, begin_token=7, tile=9)
    found = ImageProcessor.load(tmp_path, spec).read(Image.new("RGB", size, "red"), "images[0]")
    assert found.pixels.shape == (tiles, 3, 56, 56) and found.length == 9 * tiles and found.grid is None


@pytest.mark.parametrize(
    ("size", "seen"), [((1200, 20), True), ((20, 1200), True), ((1600, 20), False), ((1, 800), False)]
)
def test_what_would_grow_before_it_is_cut_has_sides_alike(tmp_path: Path, size: tuple[int, int], seen: bool) -> None:
    """A file of 90 bytes took gigabytes."""
    LlavaImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}).save_pretrained(
        tmp_path
    )
    made = ImageProcessor.load(tmp_path, VisionSpec(image_token=7, begin_token=7, length=576))
    if seen:
        assert made.read(Image.new("RGB", size), "images[1]").pixels.shape == (1, 3, 336, 336)
        return
    with pytest.raises(InvalidRequest, match=rf"images\[1\].*sides too unlike: {size[0]} x {size[1]} pixels"):
        made.read(Image.new("RGB", size), "images[1]")


def test_a_blank_image_is_read_or_the_processor_is_no_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load(tmp_path, QWEN)
    assert made.read_blank().length > 0
    monkeypatch.setattr(module, "BLANK", (4_000, 10))
    with pytest.raises(ModelLoadError, match="reads no image"):
        made.read_blank()


def test_what_a_processor_refuses_names_the_image(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"images\[2\].*cannot be processed.*aspect ratio"):
        load(tmp_path, QWEN).read(Image.new("RGB", (4_000, 10)), "images[2]")


def test_a_checkpoint_without_a_processor_and_a_machine_without_pillow_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadError, match=r"no usable preprocessor_config\.json"):
        ImageProcessor.load(tmp_path, QWEN)
    monkeypatch.setattr(module, "has_pillow", lambda: False)
    with pytest.raises(ConfigError, match=r"slipstream\[vision\]"):
        ImageProcessor.load(tmp_path, QWEN)
