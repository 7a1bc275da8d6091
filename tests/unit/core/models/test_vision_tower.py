"""Embeddings in the place of image tokens, and positions that images have moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.vision_batch import StepImage, VisionBatch
from core.models.vision.families import OnlyEmbeddings
from core.models.vision.tower import VisionTower
from core.types.image import ReadImage
from core.types.vision_spec import VisionSpec

HIDDEN, VOCAB = 3, 8


class Bright(OnlyEmbeddings):
    """A family whose images are all 9."""

    def spec(self, config: Any) -> VisionSpec:
        raise NotImplementedError

    def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
        return torch.full((image.length, HIDDEN), 9.0)


class Model(torch.nn.Module):
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.table


def tower(image_token: int, places: bool = False) -> tuple[VisionTower, torch.Tensor]:
    model: Any = Model()
    return VisionTower(model, Bright(), VisionSpec(image_token, image_token, places=places)), model.table.weight


def step(ids: list[int], vision: VisionBatch | None) -> Any:
    return SimpleNamespace(input_ids=torch.tensor(ids), positions=torch.arange(len(ids)) + 10, vision=vision)


IMAGE = StepImage(1, 0, 2, ReadImage(np.zeros((2, 3), np.float32), None, 2))


@pytest.mark.parametrize("token", [7, 8, 900])
def test_images_take_the_place_of_their_tokens(token: int) -> None:
    """Also of a token that the table does not have."""
    made, table = tower(token)
    found = made.embeddings(step([1, 2, token, token, 3], VisionBatch((IMAGE,), None, None)))
    assert found is not None and torch.equal(found[[0, 1, 4]], table[[1, 2, 3]]) and (found[2:4] == 9).all()
    assert made.embeddings(step([1, 2], None)) is None
    assert made.embeddings(step([1, 2], VisionBatch((), None, np.array([0, 1])))) is None


def test_a_token_that_no_image_belongs_to_keeps_its_embedding() -> None:
    made, table = tower(7)
    found = made.embeddings(step([7, 2, 7, 7, 7], VisionBatch((IMAGE,), None, None)))
    assert found is not None and torch.equal(found[[0, 1, 4]], table[[7, 2, 7]])


def test_what_stands_for_a_piece_is_read_as_padding_where_the_model_says_so() -> None:
    """In every step, whether an image is in it or not."""
    spec = VisionSpec(7, 7, filler=0, filled=(7, 5))
    model: Any = Model()
    made, table = VisionTower(model, Bright(), spec), model.table.weight
    assert made.ids(step([1, 7, 5, 2], None)).tolist() == [1, 0, 0, 2]
    found = made.embeddings(step([7, 5, 7, 7, 3], VisionBatch((IMAGE,), None, None)))
    assert found is not None and torch.equal(found[[0, 1, 4]], table[[0, 0, 3]]) and (found[2:4] == 9).all()
    assert tower(7)[0].ids(step([1, 7], None)).tolist() == [1, 7]


def test_what_does_not_fit_is_told() -> None:
    class Blind(Bright):
        def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
            raise ValueError("such an image\nis not for it")

    model: Any = Model()
    spec = VisionSpec(7, 7, rows=("", ""))
    assert tower(7)[0].misfit(IMAGE.image) == ""
    assert VisionTower(model, Blind(), VisionSpec(7, 7)).misfit(IMAGE.image) == "such an image"
    apart = ReadImage(np.zeros((2, 3), np.float32), (1, 2, 3), 7, np.array([0, 1, 2, 4, 5, 6]))
    found = VisionTower(model, Bright(), spec).misfit(apart)
    assert found == "an image has 6 tokens, and the vision tower makes 7 of it"


def test_rows_of_an_image_leave_what_is_between_them() -> None:
    class Counted(Bright):
        def features(self, model: Any, image: ReadImage, pixels: torch.Tensor) -> torch.Tensor:
            return torch.arange(1.0, 5.0)[:, None].expand(4, HIDDEN) * 10

    model: Any = Model()
    made = VisionTower(model, Counted(), VisionSpec(7, 7, rows=("b", "e")))
    shown = StepImage(1, 0, 1, ReadImage(np.zeros((2, 3), np.float32), (1, 2, 2), 5, np.array([0, 1, 3, 4])))
    found = made.embeddings(step([1, 7, 7, 5, 7, 7, 6], VisionBatch((shown,), None, None)))
    assert found is not None and found[[1, 2, 4, 5], 0].tolist() == [10, 20, 30, 40]
    assert torch.equal(found[[0, 3, 6]], model.table.weight[[1, 5, 6]])


def test_positions_of_chunks_are_given_and_those_of_decodes_moved() -> None:
    made, _ = tower(7, places=True)
    chunks = np.array([[0, 1], [0, 2], [0, 3]])
    found = made.positions(step([1, 7, 2, 3], VisionBatch((), chunks, np.array([-5, 4]))))
    assert found.tolist() == [[0, 1, 7, 17], [0, 2, 7, 17], [0, 3, 7, 17]]
    assert made.positions(step([1, 2], None)).tolist() == [10, 11]
    one_way, _ = tower(7)
    assert one_way.positions(step([1, 2], VisionBatch((), chunks, None))).tolist() == [10, 11]
