"""What the threads of the products compute beside products: attention of texts, and activations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import activations

from core.config import ModelConfig
from core.models.encoder_only.backend import EncoderOnlyModel
from core.models.encoder_only.packed_encoder import ByDistance, EncoderContext, attend_within
from core.models.encoder_only.ways import PackedTexts
from core.models.loader import load_model
from core.models.products import family
from core.models.products.family import PackedProducts
from core.models.products.packing import ACTIVATIONS, matrices_of
from tests.support.encoders import make_encoder

Text = tuple[int, int]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def texts_of(lens: Sequence[int]) -> list[Text]:
    return list(pairwise([sum(lens[:count]) for count in range(len(lens) + 1)]))


def inputs(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values as a model has them: heads of a token side by side."""
    return [torch.randn(1, tokens, each, dim).to(dtype).transpose(1, 2) for each in (heads, kv_heads, kv_heads)]


def seen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text: Text,
    scale: float,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, n, H, D] by torch, in float32."""
    parts = (each[:, :, slice(*text)].float() for each in (query, key, value))
    found = functional.scaled_dot_product_attention(*parts, attn_mask=bias, scale=scale, enable_gqa=True)
    return found.transpose(1, 2)


def bias_of(distances: torch.Tensor, length: int) -> torch.Tensor:
    """[1, H, n, n], pair by pair."""
    middle = distances.shape[1] // 2
    found = torch.empty(len(distances), length, length)
    for query in range(length):
        for key in range(length):
            found[:, query, key] = distances[:, middle + key - query]
    return found[None]


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "threads"), [(3, 3, 24, 1), (4, 2, 32, 2), (2, 1, 64, 3), (2, 2, 80, 2), (1, 1, 8, 2)]
)
def test_each_token_sees_all_of_its_own_text_and_no_other(
    products_code: Any, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, threads: int
) -> None:
    torch.manual_seed(dim)
    lens = (3, 1, 64, 65, 17, 128, 129, 300)
    query, key, value = inputs(sum(lens), heads, kv_heads, dim, dtype)
    out = torch.full((1, sum(lens), heads, dim), 7.0, dtype=dtype)
    left_out, texts = texts_of(lens)[4], [text for text in texts_of(lens) if text != texts_of(lens)[4]]
    products_code.attend(products_code.Crew(threads, False), query, key, value, texts, 0.3, out)
    for text in texts:
        want = seen(query, key, value, text, 0.3)
        torch.testing.assert_close(out[:, slice(*text)].float(), want, atol=NEAR[dtype], rtol=NEAR[dtype])
    assert (out[:, slice(*left_out)] == 7.0).all()


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "threads", "spare"), [(3, 3, 24, 1, 0), (4, 2, 32, 2, 5)])
def test_scores_get_what_the_head_has_for_the_distance(
    products_code: Any, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, threads: int, spare: int
) -> None:
    torch.manual_seed(dim)
    lens = (3, 1, 64, 200, 65)
    query, key, value = inputs(sum(lens), heads, kv_heads, dim, dtype)
    distances = 2 * torch.randn(heads, 2 * (200 + spare) - 1)
    out = torch.empty(1, sum(lens), heads, dim, dtype=dtype)
    crew = products_code.Crew(threads, False)
    products_code.attend(crew, query, key, value, texts_of(lens), 0.3, out, distances)
    for text, length in zip(texts_of(lens), lens, strict=True):
        bias = bias_of(distances, length)
        torch.testing.assert_close(ByDistance(distances).of(length), bias)
        want = seen(query, key, value, text, 0.3, bias)
        torch.testing.assert_close(out[:, slice(*text)].float(), want, atol=NEAR[dtype], rtol=NEAR[dtype])


def test_distances_that_do_not_fit_are_refused(products_code: Any) -> None:
    query, key, value = inputs(6, 2, 2, 8, torch.float32)
    crew, out = products_code.Crew(1, False), torch.empty(1, 6, 2, 8)
    good = torch.zeros(2, 11)
    products_code.attend(crew, query, key, value, [(0, 6)], 1.0, out, good)
    for bad in (good[:1], good[:, 1:], good[:, 1:].contiguous(), good.bfloat16(), good.T.contiguous().T, good[0]):
        with pytest.raises(RuntimeError, match="no row of distances for each head"):
            products_code.attend(crew, query, key, value, [(0, 6)], 1.0, out, bad)
    with pytest.raises(RuntimeError, match="distances of 5 tokens do not do for a text of 6"):
        products_code.attend(crew, query, key, value, [(0, 6)], 1.0, out, good[:, 1:-1].contiguous())


def test_texts_and_tensors_that_do_not_fit_are_refused(products_code: Any) -> None:
    crew = products_code.Crew(1, False)
    query, key, value = inputs(6, 2, 2, 8, torch.float32)
    out = torch.empty(1, 6, 2, 8)
    for text in ((-1, 3), (3, 3), (2, 7)):
        with pytest.raises(IndexError, match="no text is from"):
            products_code.attend(crew, query, key, value, [text], 1.0, out)
    three = query.repeat(1, 2, 1, 1)[:, :3]
    for q, k, v in (
        (query, key[:, :1], value),
        (query, key[:, :, :5], value[:, :, :5]),
        (query, key[..., :4], value[..., :4]),
        (three, key, value),
        (query[0], key, value),
    ):
        with pytest.raises(RuntimeError, match="do not go with keys"):
            products_code.attend(crew, q, k, v, [(0, 5)], 1.0, out)
    for room in (out[:, :5], out.bfloat16(), out.transpose(1, 2)):
        with pytest.raises(RuntimeError, match="no room"):
            products_code.attend(crew, query, key, value, [(0, 6)], 1.0, room)


@pytest.mark.parametrize(("window", "limit"), [(None, 90), (20, 20), (500, 90)])
def test_compiled_code_gets_texts_that_are_seen_whole_and_torch_the_others(window: int | None, limit: int) -> None:
    torch.manual_seed(1)
    lens = (3, 20, 21, 90)
    query, key, value = inputs(sum(lens), 2, 2, 8, torch.float32)
    context, asked, given = EncoderContext(), list[tuple[Text, float]](), list[torch.Tensor | None]()
    context.begin(lens)
    if window is not None:
        context.windows[nn.Identity()] = window
    plain = attend_within(context, query, key, value, window=window)

    def attend(
        query: Any, key: Any, value: Any, texts: Sequence[Text], scale: float, out: torch.Tensor, distances: Any = None
    ) -> None:
        given.append(distances)
        for text in texts:
            asked.append((text, scale))
            out[:, slice(*text)] = seen(query, key, value, text, scale)

    assert context.longest_by_torch(lens) == 90
    context.attend = attend
    assert context.longest_by_torch(lens) == (90 if limit < 90 else 0)
    assert context.longest_by_torch((3, 20)) == context.longest_by_torch(()) == 0
    torch.testing.assert_close(attend_within(context, query, key, value, window=window), plain)
    assert asked == [(text, 8**-0.5) for text in texts_of(lens) if text[1] - text[0] <= limit]
    asked.clear()
    attend_within(context, query, key, value, window=window, scaling=0.3)
    assert {scale for _, scale in asked} == {0.3}
    assert given == [None, None]
    table = torch.zeros(2, 179)
    attend_within(context, query, key, value, distances=ByDistance(table))
    assert given[2] is table
    assert not context.only_torch
    asked.clear()
    attend_within(context, query, key, value, bias_of=lambda start, end: torch.zeros(1, 2, end - start, end - start))
    attend_within(context, query, key, value[..., :4])
    assert not asked, "neither scores with a bias nor values of another width"
    assert context.longest_by_torch((3, 20)) == 20


@pytest.mark.parametrize(
    ("kind", "dtype"), [("bert", "float32"), ("mpnet", "float32"), ("mpnet", "bfloat16"), ("ibert", "bfloat16")]
)
def test_an_encoder_attends_by_compiled_code_once_its_products_are_in_place(
    products_code: Any, tmp_path: Path, kind: str, dtype: str
) -> None:
    path = make_encoder(kind, tmp_path)
    model = load_model(ModelConfig(str(path), dtype=dtype, native="wait"), torch.device("cpu"))
    assert isinstance(model, EncoderOnlyModel) and isinstance(model.way, PackedTexts)
    context = model.way._context
    ids, places = torch.arange(9) + 5, torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])
    plain = model.way.states(ids, places, None, (3, 6))
    assert context.attend is None, "the first step puts it in place"
    assert model.products is not None
    model.products.begin(9, 6)
    compiled = model.way.states(ids, places, None, (3, 6))
    model.products.end()
    assert context.attend is not None
    near = 5e-2 * float(plain.abs().max()) if dtype == "bfloat16" else 1e-4
    torch.testing.assert_close(compiled, plain, atol=near, rtol=1e-4)


def test_attention_that_is_wrong_serves_no_text(
    products_code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is proved with the products, before it takes torch's place."""

    def blind(crew: Any, query: Any, key: Any, value: Any, texts: Any, scale: float, out: torch.Tensor, _: Any) -> None:
        out.zero_()

    parts = {name: getattr(products_code, name) for name in ("Activated", "Crew", "Experts", "Joined", "Product")}
    monkeypatch.setattr(family, "load_extension", lambda: SimpleNamespace(**parts, attend=blind))
    model = load_model(ModelConfig(str(make_encoder("bert", tmp_path)), native="wait"), torch.device("cpu"))
    assert isinstance(model, EncoderOnlyModel) and isinstance(model.products, PackedProducts)
    assert model.products.packed == 0


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_those_of_transformers(products_code: Any, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    module = (getattr(activations, name, None) or getattr(nn, name))()
    activated = products_code.Activated(products_code.Crew(2, False), ACTIVATIONS[name])
    for shape in ((1,), (7, 3), (5, 2048), (3, 1, 4099)):
        x = (3 * torch.randn(shape)).to(dtype)
        for given in (x, x.movedim(0, -1)):
            found = activated(given)
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), module(given.float()), atol=NEAR[dtype], rtol=NEAR[dtype])
    assert activated(torch.tensor([torch.nan, 1.0], dtype=dtype)).isnan().tolist() == [True, False]
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        activated(torch.ones(3, dtype=torch.float64))


def test_activations_are_found_and_one_that_writes_to_its_input_is_left() -> None:
    model = nn.ModuleDict({"one": activations.GELUActivation(), "other": nn.ReLU(inplace=True), "tanh": nn.Tanh()})
    assert list(matrices_of(model)) == ["one"]
