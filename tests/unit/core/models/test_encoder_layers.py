"""Whole layers of encoders in one call: what they compute, and which modules are taken for one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from core.config import ModelConfig
from core.models.encoder_only.backend import EncoderOnlyModel
from core.models.encoder_only.packed_encoder import EncoderContext
from core.models.hf.packed_attention import bind_context
from core.models.loader import load_model
from core.models.products import family
from core.models.products.family import PackedProducts
from core.models.products.layers import LayerForward, layers_in
from core.models.products.packing import put_in_place
from tests.support.encoders import ENCODERS, make_encoder
from tests.unit.core.models.test_joined import LAYERS, LENS, NEAR, close, packed_of, states
from tests.unit.core.models.test_text_attention import Text, texts_of

WIDTH, INNER, HEADS, MOST = 32, 80, 4, 64
TEXTS = (5, 1, MOST, 17)
APART = (
    *("convbert", "deberta", "deberta-v2", "eurobert", "gemma3_text", "gte", "ibert", "jina_embeddings_v3"),
    *("mobilebert", "modernbert", "nomic_bert", "roformer"),
)
"""Types whose layers have a gate, rotated queries, or parts of their own."""
ONE = ("albert",)
"""Types of which all layers are one, in a group of its own."""


class Layer(nn.Module):
    """A layer as `how` says, whose attention is the context's."""

    slipstream_context: EncoderContext

    def __init__(self, how: str = "behind", kv_heads: int = HEADS) -> None:
        super().__init__()
        narrow = WIDTH // HEADS * kv_heads
        if how == "second norm first":
            self.behind = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, narrow), nn.Linear(WIDTH, narrow)
        self.found, self.first, self.act = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()
        self.into, self.out, self.drop = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Dropout(0.5)
        if how != "second norm first":
            self.behind = nn.LayerNorm(WIDTH)
        if how == "one more":
            self.more = nn.Linear(WIDTH, WIDTH)
        if how == "a weight":
            self.weight = nn.Parameter(torch.ones(WIDTH))
        if how == "another activation":
            self.other = nn.SiLU()
        self.how, self.kv_heads, self.distances = how, kv_heads, torch.Tensor()
        for norm in (self.first, self.behind):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.eval()

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        context, how = self.slipstream_context, self.how
        q, k, v = (
            made(x).view(1, x.shape[1], heads, -1).transpose(1, 2)
            for made, heads in ((self.query, HEADS), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        out, distances = x.new_empty(1, x.shape[1], HEADS, WIDTH // HEADS), None
        if how == "distances":
            distances = self.distances
        elif how == "distances of a step":
            distances = self.distances + 0
        texts = context.texts[:-1] if how == "not all texts" else context.texts
        for _ in range(2 if how == "attends twice" else 1):
            assert context.attend is not None
            context.attend(q, k, v, texts, 0.3, out, distances)
        return out.flatten(2)

    def forward(self, hidden_states: torch.Tensor, mask: object = None) -> Any:
        x, how = hidden_states, self.how
        if how == "before":
            between = x + self.found(self.attended(self.first(x)))
            return between + self.out(self.act(self.into(self.behind(between))))
        between = self.first(x + self.found(self.attended(x)))
        if how == "another residual":
            between = between + x
        made = self.behind(between + self.out(self.act(self.into(between))))
        return {
            "tuple": (made,),
            "tuple with nothing": (made, None, None),
            "tuple with more": (made, between),
            "first token": made[:, :1],
        }.get(how, made)


class Model(nn.Module):
    """Layers by name, each of which sees the same."""

    slipstream_context: EncoderContext

    def __init__(self, layers: dict[str, Layer], code: Any, crew: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.code, self.packed = code, packed_of(self, code, crew)
        context = EncoderContext(texts=tuple(texts_of(TEXTS)))
        context.attend = lambda *given: code.attend(crew, *given)
        bind_context(self, context)
        self.x = torch.randn(1, sum(TEXTS), WIDTH)

    def run(self) -> dict[str, Any]:
        return {name: layer(self.x, mask=None) for name, layer in self.layers.items()}

    def found(self) -> dict[str, LayerForward]:
        found = layers_in(self, self.packed, self.code, self.run)
        assert all(isinstance(each, LayerForward) for each in found.values())
        return {name.removeprefix("layers."): each for name, each in found.items()}  # type: ignore[misc]


@pytest.fixture(scope="module")
def crew(products_code: Any) -> Any:
    return products_code.Crew(2, False)


def attention(q: Any, k: Any, v: Any, texts: Sequence[Text], distances: torch.Tensor | None) -> torch.Tensor:
    """[1, T, H D] of what heads of queries see, by torch."""
    parts = []
    for start, end in texts:
        each = [made[:, start:end].unflatten(2, (heads, -1)).transpose(1, 2) for made, heads in (q, k, v)]
        count, bias = end - start, None
        if distances is not None:
            places = torch.arange(count)
            bias = distances[:, places[None] - places[:, None] + distances.shape[1] // 2]
        seen = functional.scaled_dot_product_attention(*each, attn_mask=bias, scale=0.3, enable_gqa=True)
        parts.append(seen.transpose(1, 2).flatten(2))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(("kv_heads", "biased"), [(HEADS, False), (2, True), (1, False)])
@pytest.mark.parametrize("before", [False, True])
def test_a_layer_computes_what_its_parts_do(
    products_code: Any, crew: Any, *, before: bool, kv_heads: int, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(kv_heads)
    layer = Layer(kv_heads=kv_heads).to(dtype)
    norms = [(each.weight.detach(), each.bias.detach(), 1e-5, True, WIDTH) for each in (layer.first, layer.behind)]
    made = [layer.query, layer.key, layer.value, layer.found, layer.into, layer.out]
    halves = dtype == torch.bfloat16
    products = [products_code.Product(crew, halves, each.weight.detach(), None, each.bias.detach()) for each in made]
    distances = torch.randn(HEADS, 2 * MOST - 1) if biased else None
    compiled = products_code.EncoderLayer(products, "gelu", *norms, before, HEADS, kv_heads, 0.3, distances)
    x, texts = torch.randn(1, sum(TEXTS), WIDTH).to(dtype), texts_of(TEXTS)
    wide = layer.float()
    into = wide.first(x.float()) if before else x.float()
    seen = attention(
        *((wide.query(into), HEADS), (wide.key(into), kv_heads), (wide.value(into), kv_heads)), texts, distances
    )
    between = x.float() + wide.found(seen)
    between = between if before else wide.first(between)
    want = between + wide.out(functional.gelu(wide.into(wide.behind(between) if before else between)))
    close(compiled(x, texts), (want if before else wide.behind(want)).detach())
    few = texts_of((3, 2))
    close(compiled(x[:, :5], few), compiled(x[:, [0, 1, 2, 3, 4, 4]], [*few, (5, 6)])[:, :5].float())


def test_gelu_is_near_over_all_numbers(products_code: Any, crew: Any) -> None:
    activated = products_code.Activated(crew, "gelu")
    x = torch.cat([torch.linspace(-12, 12, 240_001), torch.tensor([-1e30, -1e-30, 1e-30, 1e30])])
    found, want = activated(x).double(), functional.gelu(x.double())
    assert ((found - want).abs() <= 3e-7 * x.double().abs()).all(), "half of an error of 4e-7, and rounding"
    assert activated(torch.tensor([torch.nan, torch.inf])).tolist()[1] == torch.inf
    assert activated(torch.tensor([torch.nan])).isnan().all()


def test_a_layer_refuses_what_does_not_fit(products_code: Any, crew: Any) -> None:
    def product(inputs: int, outputs: int) -> Any:
        return products_code.Product(crew, False, torch.randn(outputs, inputs), None, None)

    norm = (torch.ones(WIDTH), None, 1e-5, True, WIDTH)
    square = product(WIDTH, WIDTH)
    products = [square, square, square, square, product(WIDTH, INNER), product(INNER, WIDTH)]

    def layer(given: Any = products, heads: int = HEADS, kv_heads: int = HEADS, distances: Any = None) -> Any:
        return products_code.EncoderLayer(given, "gelu", norm, norm, False, heads, kv_heads, 1.0, distances)

    x = torch.randn(1, 4, WIDTH)
    assert layer()(x, [(0, 4)]).shape == x.shape
    for given in (products[:5], [*products, square]):
        with pytest.raises(RuntimeError, match="has 6 products"):
            layer(given)
    for heads, kv_heads in ((4, 3), (4, 0)):
        with pytest.raises(RuntimeError, match="do not share"):
            layer(heads=heads, kv_heads=kv_heads)
    for kv_heads, heads in ((2, 4), (3, 3)):
        with pytest.raises(RuntimeError, match="heads do not share queries"):
            layer(heads=heads, kv_heads=kv_heads)(x, [(0, 4)])
    for few in (torch.randn(3, 7), torch.randn(4, 6), torch.randn(4, 7).double()):
        with pytest.raises(RuntimeError, match="no row of distances"):
            layer(distances=few)
    with pytest.raises(RuntimeError, match="do not do for a text of 4"):
        layer(distances=torch.randn(4, 5))(x, [(0, 4)])
    for bad in (x[0], x.expand(2, 4, WIDTH)):
        with pytest.raises(RuntimeError, match="takes a row of tokens"):
            layer()(bad, [(0, 4)])
    with pytest.raises(RuntimeError, match="of 32 elements are multiplied"):
        layer()(torch.randn(1, 4, 31), [(0, 4)])
    with pytest.raises(IndexError, match="no text is from 2 to 5"):
        layer()(x, [(2, 5)])


def test_a_layer_is_known_by_what_it_has_and_computes(products_code: Any, crew: Any) -> None:
    torch.manual_seed(0)
    names = ("behind", "before", "second norm first", "tuple", "tuple with nothing", "distances")
    others = (
        *("tuple with more", "first token", "one more", "a weight", "another activation", "another residual"),
        *("distances of a step", "not all texts", "attends twice", "windows", "torch's matrix", "own forward"),
    )
    layers = {name: Layer(name) for name in (*names, *others)}
    for name in ("distances", "distances of a step"):
        del layers[name].distances
        layers[name].register_buffer("distances", torch.randn(HEADS, 2 * MOST - 1))
    model = Model(layers, products_code, crew)
    model.slipstream_context.windows[layers["windows"].query] = 8
    del model.packed["layers.torch's matrix.out"]
    layers["own forward"].forward = layers["own forward"].forward  # type: ignore[method-assign]
    expected, found = model.run(), model.found()
    assert set(found) == set(names)
    for name, forward in found.items():
        got, want = forward(model.x, None), expected[name]
        assert type(got) is type(want)
        if isinstance(want, tuple):
            assert got[1:] == want[1:]
            got, want = got[0], want[0]
        close(got, want.detach())


def test_a_layer_that_computes_it_once_only_stays(products_code: Any, crew: Any) -> None:
    """ALBERT calls one layer again and again; what came of each call is compared."""

    class Turned(Layer):
        def __init__(self, turn: float) -> None:
            super().__init__()
            self.turn, self.calls = turn, 0

        def forward(self, hidden_states: torch.Tensor, mask: object = None) -> Any:
            self.calls += 1
            return super().forward(hidden_states) * self.turn ** (self.calls - 1)

    model = Model({"same": Turned(1.0), "other": Turned(1.1)}, products_code, crew)
    twice = layers_in(model, model.packed, products_code, lambda: (model.run(), model.run()))
    assert set(twice) == {"layers.same"}


def test_attention_of_other_modules_is_not_the_layers(products_code: Any, crew: Any) -> None:
    """Behind it is one that is no layer, and attends."""
    model = Model({"behind": Layer(), "other": Layer("a weight")}, products_code, crew)
    assert set(model.found()) == {"behind"}


def test_a_step_may_be_longer_than_those_before(products_code: Any) -> None:
    model = Model({"behind": Layer()}, products_code, products_code.Crew(2, False))
    (forward,) = model.found().values()
    for lens in ((3,), (200, 9), (1, 4)):
        x = torch.randn(1, sum(lens), WIDTH)
        model.slipstream_context.texts = tuple(texts_of(lens))
        close(forward(x), model.layers["behind"](x).detach())


def test_nothing_of_the_watch_is_left(products_code: Any, crew: Any) -> None:
    model = Model({"behind": Layer()}, products_code, crew)
    attend = model.slipstream_context.attend

    def fails() -> None:
        model.run()
        raise ValueError("in the middle")

    for run in (model.run, fails):
        try:
            layers_in(model, model.packed, products_code, run)
        except ValueError:
            assert run is fails
        assert "forward" not in vars(model.layers["behind"]) and model.slipstream_context.attend is attend


def test_a_copy_of_a_layer_sees_texts_of_its_own(products_code: Any, crew: Any) -> None:
    proved, itself = (Model({"behind": Layer()}, products_code, crew) for _ in range(2))
    itself.load_state_dict(proved.state_dict())
    found = layers_in(proved, proved.packed, products_code, proved.run)
    assert put_in_place(itself, found, dict.fromkeys(found, ())) == 1
    itself.slipstream_context.texts, x = ((0, 3), (3, 5)), itself.x[:, :5]
    proved.slipstream_context.texts = ((0, 3), (3, 5))
    want = proved.layers["behind"](x)
    proved.slipstream_context.texts = ((0, 5),)
    close(itself.layers["behind"](x), want.detach())


@pytest.mark.parametrize("kind", ENCODERS)
def test_layers_of_every_type_give_what_their_modules_give(
    products_code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = str(make_encoder(kind, tmp_path))
    whole = list[str]()

    def noted(*given: Any) -> Any:
        found = layers_in(*given)
        whole.extend(found)
        return found

    monkeypatch.setattr(family, "layers_in", noted)
    model = load_model(ModelConfig(path, dtype="float32", native="wait"), torch.device("cpu"))
    monkeypatch.setattr(family, "layers_in", lambda *_: {})
    monkeypatch.setattr(family, "joined_in", lambda *_: {})
    apart = load_model(ModelConfig(path, dtype="float32", native="wait"), torch.device("cpu"))
    assert isinstance(model, EncoderOnlyModel) and isinstance(apart, EncoderOnlyModel)
    assert isinstance(model.products, PackedProducts) and model.products.packed
    close(states(model), states(apart))
    close(states(model, LENS[:2]), states(apart, LENS[:2]))
    assert len(whole) == (0 if kind in APART else 2 if kind in ONE else LAYERS), whole


def test_layers_that_compute_wrongly_serve_no_text(
    products_code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model is compared with them in place."""
    monkeypatch.setattr(family, "layers_in", lambda *_: {"encoder.layer.1": lambda x, *_, **__: x})
    model = load_model(ModelConfig(str(make_encoder("bert", tmp_path)), native="wait"), torch.device("cpu"))
    assert isinstance(model, EncoderOnlyModel) and isinstance(model.products, PackedProducts)
    assert model.products.packed == 0
