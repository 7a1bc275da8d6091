"""What an encoder tells those that compute its products of the texts of a step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from core.models.products.family import PackedProducts
from core.types.io import EmbedResult
from tests.proofs.equivalence.test_embeddings import embed, engine
from tests.support.encoders import make_encoder


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> set[int | None]:
    """What products were told of the longest text of each step."""
    begin, told = PackedProducts.begin, set[int | None]()

    def listen(products: PackedProducts, tokens: int, longest: int | None = None) -> None:
        told.add(longest)
        begin(products, tokens, longest)

    monkeypatch.setattr(PackedProducts, "begin", listen)
    return told


@pytest.mark.parametrize(("kind", "longest"), [("deberta", 5), ("mpnet", 0), ("bert", 0)])
async def test_products_hear_how_long_the_longest_text_is(
    tmp_path: Path, told: set[int | None], kind: str, longest: int
) -> None:
    """Threads of torch are of no use to short texts, however many share a step, nor where it attends to none."""
    async with engine(make_encoder(kind, tmp_path), rows=8, model_fields={"native": "wait"}) as made:
        await embed(made, [5, 6, 7])
        told.clear()
        await embed(made, [5, 6, 7], [8, 9, 10, 11, 12])
    assert told == {longest}


async def test_texts_need_no_room_for_keys_and_values(tmp_path: Path) -> None:
    """Here there is some for 16 tokens; each of these texts has 100, and there are more of them than rows."""
    text = tuple(range(5, 105))
    async with engine(make_encoder("bert", tmp_path), rows=4, pool=16) as made:
        (answers,) = await asyncio.gather(embed(made, *[text] * 9), return_exceptions=True)
        assert isinstance(answers, EmbedResult) and len(answers.embeddings) == 9, answers
        for each in answers.embeddings:
            np.testing.assert_allclose(each.values, answers.embeddings[0].values, atol=1e-5)
        assert {pool.name: pool.used for pool in made.stats.pools} == {"req": 0, "kv_page": 0}


async def test_products_are_told_nothing_of_texts_that_share_operations(tmp_path: Path, told: set[int | None]) -> None:
    directory = make_encoder("deberta", tmp_path, talking_head=True)
    async with engine(directory, rows=8, model_fields={"native": "wait"}) as made:
        told.clear()
        await embed(made, [5, 6, 7], [8, 9, 10])
    assert told == {None}
