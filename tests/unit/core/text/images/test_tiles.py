"""The text around an image's tiles, as the processor of Idefics 3 writes it."""

from __future__ import annotations

import pytest

from core.types.vision_spec import TileTexts

TEXTS = TileTexts(tile="<f><{row},{column}>", row="\n", whole="\n<f><g>", alone="<f><g>", end="<f>")


@pytest.mark.parametrize(
    ("rows", "columns", "written"),
    [
        (0, 0, "<f><g>PP<f>"),
        (1, 2, "<f><1,1>PP<f><1,2>PP\n\n<f><g>PP<f>"),
        (2, 1, "<f><1,1>PP\n<f><2,1>PP\n\n<f><g>PP<f>"),
    ],
)
def test_rows_and_columns_are_counted_from_one(rows: int, columns: int, written: str) -> None:
    assert TEXTS.run("PP", rows, columns) == written
