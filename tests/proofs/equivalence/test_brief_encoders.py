"""What an encoder tells those that compute its products of the texts of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.models.products.family import PackedProducts
from tests.proofs.equivalence.test_embeddings import embed, engine
from tests.support.encoders import make_encoder


async def test_products_hear_how_long_the_longest_text_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of torch are of no use to short texts, however many share a step."""
    begin, told = PackedProducts.begin, set[int | None]()

    def listen(products: PackedProducts, tokens: int, longest: int | None = None) -> None:
        told.add(longest)
        begin(products, tokens, longest)

    monkeypatch.setattr(PackedProducts, "begin", listen)
    async with engine(make_encoder("bert", tmp_path), rows=8, model_fields={"native": "wait"}) as made:
        told.clear()
        await embed(made, [5, 6, 7], [8, 9, 10, 11, 12])
    assert told == {5}
