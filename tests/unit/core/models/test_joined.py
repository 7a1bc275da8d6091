"""Modules that are a matrix and what stands right behind it, in one pass of compiled code."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from core.config import ModelConfig
from core.models.encoder_only.backend import EncoderOnlyModel
from core.models.loader import load_model
from core.models.products import family
from core.models.products.family import PackedProducts
from core.models.products.joined import ThenBottleneck, joined_in
from core.models.products.packing import put_in_place
from tests.support.encoders import ENCODERS, LONGEST, make_encoder
from tests.unit.core.models.test_text_attention import texts_of

NEAR = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
LENS = (1, 40, 9, LONGEST, 17)
INPUTS = 48
LAYERS = 3
JOINED = {
    **dict.fromkeys(("albert", "distilbert", "eurobert", "gemma3_text", "gte", "jina_embeddings_v3"), 0),
    **dict.fromkeys(("modernbert", "nomic_bert"), 0),
    **dict.fromkeys(("mpnet", "roberta-prelayernorm"), 2),
    "mobilebert": 12,
}
"""How many modules of a layer are joined, where it is not the usual three."""


@pytest.fixture(scope="module")
def crew(products_code: Any) -> Any:
    return products_code.Crew(2, False)


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    assert found.dtype in NEAR and found.shape == want.shape
    near = NEAR[found.dtype] * float(want.abs().max())
    torch.testing.assert_close(found.float(), want, atol=near, rtol=0)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("outputs", [1, 40, 64, 65, 192])
def test_what_stands_behind_a_matrix_is_computed_with_it(
    products_code: Any, crew: Any, outputs: int, rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(outputs * rows)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, rows, INPUTS), (outputs, INPUTS), (outputs,)))
    residual, factors, shifts = (torch.randn(shape).to(dtype) for shape in ((2, rows, outputs), (outputs,), (outputs,)))
    product = products_code.Product(crew, dtype == torch.bfloat16, weight, None, bias)
    plain = functional.linear(x.float(), weight.float(), bias.float())
    total, by, to = plain + residual.float(), factors.float(), shifts.float()
    close(products_code.Joined(product)(x), plain)
    close(products_code.Joined(product)(x, residual), total)
    close(products_code.Joined(product, "gelu")(x), functional.gelu(plain))
    close(products_code.Joined(product, "relu")(x), plain.relu())
    scaled = products_code.Joined(product, scale=factors, shift=shifts)
    close(scaled(x), plain * by + to)
    close(scaled(x, residual), total * by + to)
    for shift in (None, shifts):
        normed = products_code.Joined(product, norm=(factors, shift, 1e-3, True, outputs))
        given = None if shift is None else to
        close(normed(x, residual), functional.layer_norm(total, (outputs,), by, given, 1e-3))
        close(normed(x), functional.layer_norm(plain, (outputs,), by, given, 1e-3))
    close(products_code.Joined(product)(x, residual.transpose(0, 1).contiguous().transpose(0, 1)), total)
    close(product(x), plain)


def test_what_does_not_go_together_is_refused(products_code: Any, crew: Any) -> None:
    product = products_code.Product(crew, False, torch.randn(40, INPUTS), None, None)
    x, wide = torch.randn(3, INPUTS), torch.randn(41)
    for residual in (torch.randn(2, 40), torch.randn(3, 41), torch.randn(40, 3), torch.randn(3, 40).bfloat16()):
        with pytest.raises(RuntimeError, match="as wide as 40"):
            products_code.Joined(product)(x, residual)
    with pytest.raises(RuntimeError, match="41 outputs stands behind 40"):
        products_code.Joined(product, scale=wide, shift=wide)(x)
    with pytest.raises(RuntimeError, match="41 outputs stands behind 40"):
        products_code.Joined(product, norm=(wide, None, 1e-5, True, 41))(x)
    few = torch.randn(39)
    for named in ({"scale": few, "shift": few}, {"norm": (few, None, 1e-5, True, 39)}):
        with pytest.raises(RuntimeError, match="39 outputs stands behind 40"):
            products_code.Joined(product, **named)(x)
    for named in ({"scale": wide}, {"scale": wide, "shift": few}):
        with pytest.raises(RuntimeError, match="comes with a bias"):
            products_code.Joined(product, **named)
    with pytest.raises(RuntimeError, match="one bias for each weight"):
        products_code.Joined(product, norm=(wide, few, 1e-5, True, 41))
    with pytest.raises(ValueError, match="no activation"):
        products_code.Joined(product, "tan")


class Around(nn.Module):
    """A matrix and a norm, which compute what `how` says."""

    def __init__(self, how: str, width: int = 24) -> None:
        super().__init__()
        self.dense, self.norm, self.how = nn.Linear(INPUTS, width), nn.LayerNorm(width), how

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        found = self.dense(x)
        return {
            "sum": lambda: self.norm(found + given),
            "difference": lambda: self.norm(found - given),
            "before": lambda: self.norm(found) + given,
            "twice": lambda: self.norm(found + 2 * given),
            "first": lambda: self.norm(found + given)[:, 0],
            "fails": lambda: self.norm(found @ given),
        }[self.how]()


class Behind(nn.Module):
    """A matrix and an activation, of all tokens or of one."""

    def __init__(self, *, pools: bool) -> None:
        super().__init__()
        self.dense, self.act, self.dropout, self.pools = nn.Linear(INPUTS, 24), nn.GELU(), nn.Dropout(0.5), pools

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.act(self.dense(x[:, 0] if self.pools else x)))


def packed_of(whole: nn.Module, products_code: Any, crew: Any) -> dict[str, Any]:
    return {
        name: products_code.Product(crew, False, each.weight.detach(), None, each.bias.detach())
        for name, each in whole.named_modules()
        if isinstance(each, nn.Linear)
    }


class Answers(nn.Module):
    """A matrix, and a module behind it that answers with more than one tensor; or one that fails in another way."""

    def __init__(self, *, turns: bool = False) -> None:
        super().__init__()
        self.dense, self.turns = nn.Linear(INPUTS, 24), turns
        self.inner = nn.Identity()
        self.inner.forward = lambda x, outer: (x, outer)

    def forward(self, x: torch.Tensor, given: torch.Tensor, outer: torch.Tensor | None = None) -> Any:
        return self.dense(x).transpose(1, 3) if self.turns else self.inner(self.dense(x) + given, outer)


def test_a_module_that_cannot_be_tried_stays_apart(products_code: Any, crew: Any) -> None:
    """And costs no other module its products."""
    whole = nn.ModuleDict({"sum": Around("sum"), "more": Answers(), "turns": Answers(turns=True)})
    whole.eval()
    assert set(joined_in(whole, packed_of(whole, products_code, crew), products_code)) == {"sum"}


def test_what_is_the_same_is_judged_by_the_size_of_what_it_gives(products_code: Any, crew: Any) -> None:
    whole: Any = nn.ModuleDict({"small": Around("difference"), "sum": Around("sum")})
    whole.eval()
    nn.init.constant_(whole["small"].norm.weight, 1e-6)
    nn.init.constant_(whole["sum"].norm.weight, 1e6)
    assert set(joined_in(whole, packed_of(whole, products_code, crew), products_code)) == {"sum"}


def test_a_norm_without_a_bias_is_joined(products_code: Any, crew: Any) -> None:
    whole: Any = nn.ModuleDict({"sum": Around("sum")})
    whole["sum"].norm = nn.LayerNorm(24, bias=False)
    whole.eval()
    found = joined_in(whole, packed_of(whole, products_code, crew), products_code)
    x, given = torch.randn(2, 5, INPUTS), torch.randn(2, 5, 24)
    close(found["sum"](x, given), whole["sum"](x, given).detach())


def test_an_activation_comes_before_the_residual(products_code: Any, crew: Any) -> None:
    x, weight, residual = torch.randn(7, INPUTS), torch.randn(65, INPUTS), torch.randn(7, 65)
    product = products_code.Product(crew, False, weight, None, None)
    close(products_code.Joined(product, "gelu")(x, residual), functional.gelu(x @ weight.T) + residual)


def test_only_modules_that_compute_it_are_joined(products_code: Any, crew: Any) -> None:
    whole: Any = nn.ModuleDict({how: Around(how) for how in ("sum", "difference", "before", "twice", "first", "fails")})
    whole.update({"all": Behind(pools=False), "pooled": Behind(pools=True)})
    whole["bare"] = Around("sum")
    whole["bare"].norm = nn.LayerNorm(24, elementwise_affine=False)
    whole["own"] = Around("sum")
    whole.eval()
    packed = packed_of(whole, products_code, crew)
    whole["own"].forward = whole["own"].forward
    del packed["own.dense"]
    found = joined_in(whole, packed, products_code)
    assert set(found) == {"sum", "all"}
    x, given = torch.randn(2, 5, INPUTS), torch.randn(2, 5, 24)
    close(found["sum"](x, given), whole["sum"](x, given).detach())
    close(found["all"](x), whole["all"](x).detach())
    del packed["sum.dense"]
    assert set(joined_in(whole, packed, products_code)) == {"all"}, "torch's matrix stays torch's"


def states(model: EncoderOnlyModel, lens: tuple[int, ...] = LENS) -> torch.Tensor:
    torch.manual_seed(1)
    ids = torch.randint(8, 200, (sum(lens),))
    places = torch.cat([torch.arange(end - start) for start, end in texts_of(lens)])
    assert model.products is not None
    model.products.begin(sum(lens), max(lens))
    with torch.inference_mode():
        found = model.way.states(ids, places, None, lens)
    model.products.end()
    return found


@pytest.mark.parametrize("kind", ENCODERS)
def test_layers_of_every_type_give_what_they_give_apart(
    products_code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = str(make_encoder(kind, tmp_path))
    joined = list[str]()
    monkeypatch.setattr(family, "layers_in", lambda *_: {})

    def noted(*given: Any) -> Any:
        found = joined_in(*given)
        joined.extend(found)
        return found

    monkeypatch.setattr(family, "joined_in", noted)
    model = load_model(ModelConfig(path, dtype="float32", native="wait"), torch.device("cpu"))
    monkeypatch.setattr(family, "joined_in", lambda *_: {})
    apart = load_model(ModelConfig(path, dtype="float32", native="wait"), torch.device("cpu"))
    assert isinstance(model, EncoderOnlyModel) and isinstance(apart, EncoderOnlyModel)
    assert isinstance(model.products, PackedProducts) and model.products.packed
    close(states(model), states(apart))
    assert len(joined) == LAYERS * JOINED.get(kind, 3)


def test_a_copy_of_a_module_uses_parts_of_its_own(products_code: Any, crew: Any) -> None:
    """Products are proved on a copy, and then put in place in the model itself."""
    proved: Any = nn.ModuleDict({"out": nn.Module()})
    proved["out"].inner = Behind(pools=False)
    itself: Any = copy.deepcopy(proved)
    product = products_code.Joined(products_code.Product(crew, False, torch.eye(INPUTS), None, None))
    forward = ThenBottleneck(proved["out"], product, "inner")
    put_in_place(itself, {"out": forward}, {"out": ()})
    itself["out"].inner.forward = lambda x, outer: x + outer
    x, outer = torch.randn(2, 3, INPUTS), torch.randn(2, 3, INPUTS)
    close(itself["out"].forward(x, x, outer), 2 * x + outer)


def test_what_joins_wrongly_serves_no_text(products_code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model is compared with it in place."""
    monkeypatch.setattr(family, "layers_in", lambda *_: {})
    monkeypatch.setattr(family, "joined_in", lambda model, *_: {"encoder.layer.1.output": lambda x, given: given})
    model = load_model(ModelConfig(str(make_encoder("bert", tmp_path)), native="wait"), torch.device("cpu"))
    assert isinstance(model, EncoderOnlyModel) and isinstance(model.products, PackedProducts)
    assert model.products.packed == 0


class Proved:
    """A model of one matrix, which is proved by running."""

    def __init__(self) -> None:
        self.module: Any = nn.Sequential(Behind(pools=False))
        self.module.eval()
        self.module.device, self.module.dtype = torch.device("cpu"), torch.float32

    def twin(self) -> Proved:
        return Proved()

    def attend_by(self, attend: Any) -> None:
        pass

    def check(self) -> Any:
        self.module(torch.randn(1, 3, INPUTS))
        return SimpleNamespace(passed=True, error=0.0)


def test_decoders_keep_modules_apart(products_code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters and drafters hook matrices alone."""
    calls = list[object]()

    def noted(*given: Any) -> dict[str, Any]:
        calls.append(given)
        return {}

    monkeypatch.setattr(family, "layers_in", lambda *_: {})
    monkeypatch.setattr(family, "joined_in", noted)
    for joins in (False, True):
        model = Proved()
        products = PackedProducts(model, 1, joins)  # type: ignore[arg-type]
        products.prepare()
        assert products.packed and len(calls) == joins
