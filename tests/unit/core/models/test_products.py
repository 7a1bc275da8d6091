"""Compiled products stand in for torch's in a module tree: same logits, taken up between two steps, hooks as before."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from core.config import ModelConfig
from core.models.encoder_only.backend import EncoderOnlyModel
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model
from core.models.products import family
from core.models.products.extension import load_extension
from core.models.products.family import PackedProducts
from core.models.products.packing import DenseLinear, UnscaledLinear, matrices_of
from core.native.kept_library import ExtensionUnavailable
from tests.support.encoders import make_encoder
from tests.support.fakes.paged_steps import Part
from tests.unit.core.models.reference import PackedRun, PlainModel
from tests.unit.core.models.test_transformers_backend import STEPS, sequences, worst_error

Make = Callable[[str], Path]
CPU = torch.device("cpu")
KINDS = ("llama", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Skips these tests where no compiler is."""
    try:
        load_extension()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))


def load(path: Path, dtype: str = "float32", native: str = "wait") -> TransformersModel:
    model = load_model(ModelConfig(str(path), dtype=dtype, native=native), CPU, keeps_modules=True)
    assert isinstance(model, TransformersModel)
    return model


def products_of(model: TransformersModel) -> PackedProducts:
    assert isinstance(model.products, PackedProducts)
    return model.products


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(checkpoint: Make, kind: str) -> None:
    path, rows = checkpoint(kind), sequences()
    model, plain = load(path), PlainModel(path)
    assert products_of(model).packed > 0
    worst, same = worst_error(PackedRun(model, rows), {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 1e-4
    assert same


def test_bfloat16_stays_within_rounding(checkpoint: Make) -> None:
    path, rows = checkpoint("llama"), sequences()
    model, plain = load(path, "bfloat16"), PlainModel(path, torch.bfloat16)
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    scale = max(float(logits.abs().max()) for logits in expected.values())
    worst, _ = worst_error(PackedRun(model, rows), expected)
    assert worst < 0.05 * scale


def test_matrices_that_answer_with_a_scale_are_multiplied_by_compiled_code_too(tmp_path: Path) -> None:
    """I-BERT's: six in each layer, its activation, and three with what is behind them; and the pooler, which is another
    model's."""
    model = load_model(ModelConfig(str(make_encoder("ibert", tmp_path)), native="wait"), CPU)
    assert isinstance(model, EncoderOnlyModel) and isinstance(model.products, PackedProducts)
    assert model.products.packed == (7 + 3) * model.module.config.num_hidden_layers + 1
    ids, places = torch.arange(9) + 5, torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])
    plain = model.way.states(ids, places, None, (3, 6))
    model.products.begin(9)
    compiled = model.way.states(ids, places, None, (3, 6))
    model.products.end()
    torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-4)


def test_what_computes_in_integers_or_by_another_formula_is_no_matrix_of_these() -> None:
    class QuantLinear(torch.nn.Linear):
        """As of I-BERT, and of others that say nothing of integers."""

    tree = torch.nn.ModuleDict({name: QuantLinear(4, 4) for name in ("floats", "integers", "silent")})
    tree["floats"].quant_mode, tree["integers"].quant_mode = False, True
    tree["tanh"] = torch.nn.GELU("tanh")
    assert [(name, type(found)) for name, found in matrices_of(tree).items()] == [("floats", UnscaledLinear)]


def test_a_conv1d_is_a_linear_layer_the_other_way_round() -> None:
    tree = torch.nn.ModuleDict({"own": Conv1D(34, 70)})
    torch.nn.init.normal_(tree["own"].bias)
    extension, found = load_extension(), matrices_of(tree)
    assert list(found) == ["own"]
    x = torch.randn(3, 5, 70)
    product = found["own"].pack(extension, extension.Crew(2, False))
    torch.testing.assert_close(product(x), tree["own"](x))


def test_a_model_without_such_matrices_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(family, "matrices_of", lambda tree: {})
    with caplog.at_level(logging.INFO):
        model = load_model(ModelConfig(str(make_encoder("bert", tmp_path)), native="wait"), CPU)
    assert isinstance(model, EncoderOnlyModel) and isinstance(model.products, PackedProducts)
    assert model.products.packed == 0
    assert "torch goes on: the model has no matrices" in caplog.text
    assert "differ" not in caplog.text


def test_what_is_compiled_already_is_there_from_the_first_step(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "beside", lambda work: pytest.fail("nothing has to be compiled"))
    assert products_of(load(checkpoint("llama"), native="auto")).packed > 0


def test_they_are_taken_up_between_two_steps(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = checkpoint("llama"), sequences()
    works: list[Callable[[], None]] = []
    monkeypatch.setattr(family, "is_built", lambda: False)
    monkeypatch.setattr(family, "beside", works.append)
    model, plain = load(path, native="auto"), PlainModel(path)
    matrix = next(m for m in model.module.modules() if type(m) is torch.nn.Linear)
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    run = PackedRun(model, rows)
    for done, (parts, num_extend, sample) in enumerate(STEPS):
        got = run.step(parts, num_extend, sample)
        assert ("forward" in vars(matrix)) is (done > len(STEPS) // 2)
        for logits, index in zip(got, sample, strict=True):
            part = parts[index]
            torch.testing.assert_close(logits, expected[part.row][part.prefix + part.extend - 1], atol=1e-4, rtol=0)
        if done == len(STEPS) // 2:
            works[0]()
    assert len(works) == 1


def test_matrices_that_are_packed_are_held_once(checkpoint: Make) -> None:
    model, rows = load(checkpoint("qwen3_moe")), sequences()
    experts: Any = next(m for m in model.module.modules() if hasattr(m, "gate_up_proj"))
    gone = weakref.ref(experts.gate_up_proj)
    PackedRun(model, rows).step([Part(1, 0, 21)], 1, [0])
    assert gone() is None
    linears = [m for m in model.module.modules() if type(m) is torch.nn.Linear]
    assert linears and all(m.weight.is_meta and m.weight.shape == (m.out_features, m.in_features) for m in linears)


def test_a_matrix_that_is_read_without_a_call_stays(checkpoint: Make) -> None:
    """Attention over latents multiplies by `kv_b_proj` itself."""
    model, rows = load(checkpoint("deepseek_v3")), sequences()
    PackedRun(model, rows).step([Part(1, 0, 21)], 1, [0])
    found = {name.rpartition(".")[2]: m for name, m in model.module.named_modules() if type(m) is torch.nn.Linear}
    assert not found["kv_b_proj"].weight.is_meta
    assert found["o_proj"].weight.is_meta


def test_hooks_see_what_goes_in_and_change_what_comes_out(checkpoint: Make) -> None:
    model, rows = load(checkpoint("llama")), sequences()
    run = PackedRun(model, rows)
    parts = [Part(1, 0, 21), Part(2, 0, 5)]
    before = run.step(parts, 2, [0, 1]).clone()
    linear = next(m for m in model.module.modules() if type(m) is torch.nn.Linear)
    seen: list[int] = []

    def changed(_: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        seen.append(args[0].shape[-2])
        return output + 1.0

    handle = linear.register_forward_hook(changed)
    during = run.step(parts, 2, [0, 1]).clone()
    handle.remove()
    assert seen == [26]
    assert not torch.equal(during, before)
    assert torch.equal(run.step(parts, 2, [0, 1]), before)


def test_without_a_compiler_torch_goes_on_and_says_why(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Any:
        raise ExtensionUnavailable("no C++ compiler was found")

    monkeypatch.setattr(family, "load_extension", fails)
    rows = sequences()
    with caplog.at_level(logging.WARNING):
        model = load(checkpoint("llama"))
    assert "no C++ compiler was found" in caplog.text
    assert products_of(model).packed == 0
    assert PackedRun(model, rows).step([Part(1, 0, 21)], 1, [0]).isfinite().all()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """Each sum is made in the same order, whatever number of rows there is."""
    torch.manual_seed(3)
    extension = load_extension()
    crew = extension.Crew(2, False)
    for halves, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        weight, bias = torch.randn(130, 70).to(dtype), torch.randn(130).to(dtype)
        product = extension.Product(crew, halves, weight, None, bias)
        x = torch.randn(3, 45, 70).to(dtype)
        whole = product(x)
        near = 1e-4 if dtype == torch.float32 else 0.25
        want = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
        torch.testing.assert_close(whole.float(), want, atol=near, rtol=1e-2)
        assert whole.shape == (3, 45, 130)
        assert torch.equal(product(x[1, 7]), whole[1, 7])


def test_a_layer_with_a_bias_adds_it() -> None:
    extension, layer = load_extension(), torch.nn.Linear(70, 34)
    x = torch.linspace(-1, 1, 210).view(3, 70)
    forward = DenseLinear(layer).pack(extension, extension.Crew(1, False))
    torch.testing.assert_close(forward(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_multiply_the_rows_that_chose_them(transposed: bool) -> None:
    torch.manual_seed(4)
    extension = load_extension()
    weights, biases = torch.randn(5, 66, 40), torch.randn(5, 66)
    given = weights.transpose(1, 2).contiguous() if transposed else weights
    experts = extension.Experts(extension.Crew(2, False), given, biases, transposed)
    x, chosen = torch.randn(9, 40), torch.randint(5, (9, 2))
    want = torch.stack([weights[e] @ x[i // 2] + biases[e] for i, e in enumerate(chosen.flatten().tolist())])
    torch.testing.assert_close(experts(x, chosen), want, atol=1e-4, rtol=1e-4)
    with pytest.raises(IndexError):
        experts(x, torch.full((9, 2), 5))


@pytest.mark.parametrize(
    ("tokens", "longest", "wanted"),
    [(16, None, 1), (17, None, 2), (500, None, 2), (500, 64, 1), (500, 65, 2), (16, 16, 1)],
)
def test_threads_of_torch_stay_out_of_steps_that_are_brief_to_them(
    checkpoint: Make, tokens: int, longest: int | None, wanted: int
) -> None:
    """Where each text is attended to alone, the longest one decides."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        products = products_of(load(checkpoint("llama")))
        products.begin(tokens, longest)
        assert torch.get_num_threads() == wanted
        products.end()
    finally:
        torch.set_num_threads(before)


def test_threads_of_torch_stay_where_torch_multiplies_most(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    found = family.matrices_of
    monkeypatch.setattr(
        family, "matrices_of", lambda model: {name: each for name, each in found(model).items() if "q_proj" in name}
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        products = products_of(load(checkpoint("llama")))
        assert products.packed > 0
        products.begin(1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
