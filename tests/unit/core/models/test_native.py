"""Native decoders give the logits that transformers gives, in every kind of step, and take over while serving."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.models.hf import backend
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model, served_by
from core.models.native import family, matrices, reading
from core.models.native.extension import DECODER, load_extension
from core.models.native.family import UpgradingModel
from core.native.kept_library import ExtensionUnavailable
from core.native.library import BUILDING
from tests.support.checkpoints import CONFIGS, make_checkpoint
from tests.support.fakes.paged_steps import Part
from tests.unit.core.models.reference import PackedRun, PlainModel
from tests.unit.core.models.test_transformers_backend import STEPS, sequences, worst_error

pytestmark = pytest.mark.usefixtures("native_code")

Make = Callable[[str], Path]
CPU = torch.device("cpu")
KINDS = ("llama", "qwen2", "qwen3")


def load(path: Path, dtype: str = "float32", native: str = "wait") -> UpgradingModel:
    model = load_model(ModelConfig(str(path), dtype=dtype, native=native), CPU)
    assert isinstance(model, UpgradingModel)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(checkpoint: Make, kind: str) -> None:
    path, rows = checkpoint(kind), sequences()
    model, plain = load(path), PlainModel(path)
    assert model.native
    worst, same = worst_error(PackedRun(model, rows), {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 1e-4
    assert same


def test_logits_that_are_held_are_not_written_again(checkpoint: Make) -> None:
    """Their memory serves a later step, and only once nothing holds on to it, were it by a view."""
    rows = sequences()
    run, (row, *_) = PackedRun(load(checkpoint("llama")), rows), rows
    first = run.step([Part(row, 0, 8)], 1, [0])[:, :5]
    before = first.clone()
    second = run.step([Part(row, 8, 4)], 1, [0])
    assert torch.equal(first, before) and not torch.equal(second[:, :5], before)
    place = second.data_ptr()
    del second
    assert run.step([Part(row, 12, 1)], 0, [0]).data_ptr() == place, "it asked for no new memory"


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_within_rounding(checkpoint: Make, kind: str) -> None:
    path, rows = checkpoint(kind), sequences()
    model, plain = load(path, "bfloat16"), PlainModel(path, torch.bfloat16)
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    scale = max(float(logits.abs().max()) for logits in expected.values())
    worst, _ = worst_error(PackedRun(model, rows), expected)
    assert worst < 0.05 * scale


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_it_is_taken_up_between_two_steps(checkpoint: Make, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV, or latents, written by transformers are read by native code, and no step is without a model."""
    path, rows = checkpoint(kind), sequences()
    upgrades: list[Callable[[], None]] = []
    monkeypatch.setattr(family, "is_built", lambda: False)
    monkeypatch.setattr(family, "beside", upgrades.append)
    model, plain = load(path, native="auto"), PlainModel(path)
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    run = PackedRun(model, rows)
    for done, (parts, num_extend, sample) in enumerate(STEPS):
        assert model.native is (done > len(STEPS) // 2)
        got = run.step(parts, num_extend, sample)
        for logits, index in zip(got, sample, strict=True):
            part = parts[index]
            torch.testing.assert_close(logits, expected[part.row][part.prefix + part.extend - 1], atol=1e-4, rtol=0)
        if done == len(STEPS) // 2:
            upgrades[0]()
    assert len(upgrades) == 1


def test_states_before_the_output_matrix_are_those_of_transformers(checkpoint: Make) -> None:
    path, rows = checkpoint("qwen3"), sequences()
    found = []
    for native in ("wait", "off"):
        run = PackedRun(load_model(ModelConfig(str(path), dtype="float32", native=native), CPU), rows)
        batch = run.paged.batch([Part(1, 0, 21), Part(2, 0, 5)], 2, rows[1][:21] + rows[2][:5], [1])
        batch.wants_hidden = True
        run.model.forward(batch)
        assert batch.hidden is not None
        found.append(batch.hidden)
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_layers_read_is_that_of_transformers_and_changes_no_logit(checkpoint: Make, dtype: str) -> None:
    path, rows = checkpoint("llama"), sequences()
    found = []
    for native in ("wait", "off"):
        model = load_model(ModelConfig(str(path), dtype=dtype, native=native), CPU)
        run, last = PackedRun(model, rows), model.spec.state_of_layers
        parts, ids = [Part(1, 0, 21), Part(2, 0, 5)], rows[1][:21] + rows[2][:5]
        without = run.step(parts, 2, [1]).clone()
        batch = run.paged.batch(parts, 2, ids, [1])
        batch.wants_layers = (last, 0, 1)
        logits = model.forward(batch)
        assert batch.layer_states is not None and batch.hidden is None
        assert torch.equal(logits, without)
        batch.wants_hidden = True
        model.forward(batch)
        assert batch.layer_states.shape == (26, 3 * model.spec.hidden_size)
        assert batch.hidden is not None and batch.hidden.shape == (26, model.spec.hidden_size)
        found.append(batch.layer_states.float())
    near = 1e-4 if dtype == "float32" else 0.05 * float(found[1].abs().max())
    torch.testing.assert_close(found[0], found[1], atol=near, rtol=1e-4)


def test_a_row_that_is_not_finite_is_seen_and_its_neighbours_are_not_touched(checkpoint: Make) -> None:
    rows = sequences()
    run = PackedRun(load(checkpoint("llama")), rows)
    run.step([Part(1, 0, 21), Part(2, 0, 5)], 2, [0, 1])
    clean = run.step([Part(1, 21, 1), Part(2, 5, 1)], 0, [0, 1]).clone()
    layer = run.model.spec.kv_layers[0].layer_id
    run.paged.pool.v(layer)[run.paged.table[2, 3]] = torch.nan
    spoiled = run.step([Part(1, 21, 1), Part(2, 5, 1)], 0, [0, 1])
    assert torch.equal(spoiled[0], clean[0])
    assert spoiled[1].isnan().all()


@pytest.mark.parametrize(("kind", "reason"), [("olmo", "clipped projections"), ("bitnet", None)])
def test_what_it_does_not_compute_is_left_to_transformers(
    checkpoint: Make, tmp_path: Path, kind: str, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        path = (
            make_checkpoint("olmo", tmp_path / "model", clip_qkv=8.0, **CONFIGS["llama"])
            if kind == "olmo"
            else checkpoint(kind)
        )
        model = load_model(ModelConfig(str(path), dtype="float32", native="wait"), CPU)
    assert isinstance(model, TransformersModel)
    assert reason is None or reason in caplog.text


def test_latents_that_are_kept_expanded_are_left_to_transformers(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "absorb_latents", lambda model: False)
    with caplog.at_level(logging.INFO):
        model = load_model(ModelConfig(str(checkpoint("deepseek_v3")), dtype="float32", native="wait"), CPU)
    assert isinstance(model, TransformersModel)
    assert "its latents are expanded before they are kept" in caplog.text


def _no_compiler() -> None:
    raise ExtensionUnavailable("no C++ compiler was found")


def _not_dense(*_: object) -> None:
    raise reading.NotDense("it turns only a part of each head")


@pytest.mark.parametrize(
    ("name", "broken", "said"),
    [("load_extension", _no_compiler, "no C++ compiler"), ("NativeDecoder", _not_dense, "part of each head")],
)
def test_whatever_speaks_against_it_costs_only_speed(
    checkpoint: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    broken: object,
    said: str,
) -> None:
    monkeypatch.setattr(family, name, broken)
    path, rows = checkpoint("llama"), sequences()
    model, plain = load(path), PlainModel(path)
    assert not model.native and said in caplog.text
    assert served_by(model) == "the modules of transformers, with compiled products"
    worst, same = worst_error(PackedRun(model, rows), {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 1e-4 and same


def test_a_decoder_that_computes_something_else_is_not_used(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(matrices.Reader, "norm_of", lambda *_, **__: None)
    model = load(checkpoint("qwen3"))
    assert not model.native and "its logits differ" in caplog.text


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'decoder.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    begins = DECODER.path().name.partition(".")[0]
    left = tmp_path / "native" / f"{BUILDING}{begins}-killed"
    left.mkdir(parents=True, mode=0o700)
    with pytest.raises(ExtensionUnavailable, match="no such luck"):
        load_extension()
    kept = [path.suffix for path in (tmp_path / "native").iterdir()]
    assert kept == [".lock"], "neither a failed build nor one that was killed is left behind"
