"""Native code finds recurrent states where transformers left them, leaves its own there, and so whatever else is in the
step: snapshots, drafts, chunks, other rows, threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model
from core.models.native import family
from core.models.native.family import UpgradingModel
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes.paged_steps import Part
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel
from tests.unit.core.models.test_native_shapes import logits, sequences, steps
from tests.unit.core.models.test_recurrent_steps import (
    THREE,
    ApartRun,
    RecurrentRun,
    go_on_behind_drafts,
    resume_from_kept_states,
)

pytestmark = pytest.mark.usefixtures("native_code")

Make = Callable[[str], Path]
KINDS = ("lfm2", "mamba2", "bamba", "falcon_h1", "mamba", "falcon_mamba", "qwen3_next", "jamba", "nemotron_h")
UNLIMITED = {"nemotron_h": {"time_step_min": 1e-9}}
"""Where transformers forgets the limits of time steps in decode, its states are others."""


def load(path: Path, dtype: str = "float32", native: str = "wait") -> UpgradingModel:
    model = load_model(ModelConfig(str(path), dtype=dtype, native=native), CPU)
    assert isinstance(model, UpgradingModel) and model.native == (native == "wait")
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_kept_is_the_one_of_its_prefix(checkpoint: Make, kind: str) -> None:
    path = checkpoint(kind)
    resume_from_kept_states(path, RecurrentRun(load(path), THREE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_goes_on_behind_its_last_right_draft(checkpoint: Make, kind: str) -> None:
    path = checkpoint(kind)
    go_on_behind_drafts(path, ApartRun(load(path), THREE))


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_the_states_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    upgrades: list[Callable[[], None]] = []
    monkeypatch.setattr(family, "is_built", lambda: False)
    monkeypatch.setattr(family, "beside", upgrades.append)
    path = make_checkpoint(kind, tmp_path / "model", **UNLIMITED.get(kind, {}))
    model, want = load(path, native="auto"), PlainModel(path).logits(THREE[1])
    run = PackedRun(model, THREE)
    run.step([Part(1, 0, 9), Part(2, 0, 13)], 2)
    run.step([Part(1, 9, 1), Part(2, 13, 1)], 0)
    upgrades[0]()
    torch.testing.assert_close(run.step([Part(1, 10, 4), Part(2, 14, 1)], 1), want[[13, 14]], atol=1e-4, rtol=0)
    assert model.native


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_neither_chunks_nor_neighbours_change_a_bit(checkpoint: Make, kind: str, dtype: str) -> None:
    model = load(checkpoint(kind), dtype)
    alone = PackedRun(model, THREE)
    whole = alone.step([Part(1, 0, 16)], 1).clone()
    run = PackedRun(model, THREE)
    run.step([Part(2, 0, 9), Part(1, 0, 5), Part(3, 0, 1)], 3)
    run.step([Part(1, 5, 7), Part(3, 1, 1), Part(2, 9, 1)], 1)
    run.step([Part(3, 2, 4), Part(1, 12, 1), Part(2, 10, 1)], 1)
    run.step([Part(1, 13, 2)], 1)
    assert torch.equal(run.step([Part(2, 11, 1), Part(1, 15, 1)], 0)[1], whole[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lfm2", "bamba"])
def test_threads_do_not_change_a_bit(checkpoint: Make, kind: str, dtype: str) -> None:
    """More threads than cores, so that they are taken off their cores within a phase."""
    path = checkpoint(kind)
    for one, other in zip(logits(path, 1, dtype), logits(path, 5, dtype), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("bamba", {"mamba_n_heads": 16, "mamba_d_head": 8}, "not all multiples"),
        ("bamba", {"hidden_act": "gelu"}, "another activation"),
        ("nemotron_h", {"moe_latent_size": 32}, "projection to latents"),
    ],
)
def test_what_it_does_not_compute_is_left_to_transformers(
    tmp_path: Path, kind: str, change: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        path = make_checkpoint(kind, tmp_path / "model", **change)
        assert isinstance(load_model(ModelConfig(str(path), dtype="float32", native="wait"), CPU), TransformersModel)
    assert reason in caplog.text


DELTA = {
    "layer_types": ["linear_attention"] * 3,
    "num_hidden_layers": 3,
    "mlp_only_layers": [0, 1, 2],
    "linear_key_head_dim": 32,
    "intermediate_size": 100,
    "max_position_embeddings": 512,
}
"""Of Qwen3-Next, without experts and attention."""


def expected(path: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """By step, what `logits` are compared with."""
    plain, rows = PlainModel(path, dtype), sequences()
    found = {row: plain.logits(ids) for row, ids in rows.items()}
    return [torch.stack([found[p.row][p.prefix + p.extend - 1] for p in parts]) for parts, _ in steps(rows)]


def test_a_gated_delta_net_in_bfloat16_is_as_near_as_transformers_to_float32(tmp_path: Path) -> None:
    delta_net = make_checkpoint("qwen3_next", tmp_path / "model", **DELTA)
    true, rounded = expected(delta_net), expected(delta_net, torch.bfloat16)
    one, other = logits(delta_net, 1, "bfloat16"), logits(delta_net, 5, "bfloat16")
    assert all(torch.equal(got, again) for got, again in zip(one, other, strict=True))
    mine, theirs = (
        float(torch.cat([(got - want).abs() for got, want in zip(found, true, strict=True)]).mean())
        for found in (one, rounded)
    )
    assert mine < 1.2 * theirs
