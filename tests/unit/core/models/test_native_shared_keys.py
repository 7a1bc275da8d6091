"""Layers that read the keys of others: they compute the wanted tokens alone, whichever those are, and store nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.batch.forward_batch import ForwardBatch
from core.config import ModelConfig
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model
from core.models.native.family import UpgradingModel
from core.models.native.reading import NotDense
from core.models.native.weights import check_alone, check_declared
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes.paged_steps import Part
from tests.support.native_cases import checkpoint_of
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel

pytestmark = pytest.mark.usefixtures("native_code")

FIRST, SECOND = 90, 7
"""Tokens of two prompts: past the window, and a few."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("gemma4_text", tmp_path_factory.mktemp("shared"))


@pytest.fixture
def run(path: Path) -> PackedRun:
    model = load_model(ModelConfig(str(path), dtype="float32", native="wait"), CPU)
    assert isinstance(model, UpgradingModel) and model.native
    assert [layer.layer_id for layer in model.spec.kv_layers] == [0, 1], "the other three have none"
    generator = torch.Generator().manual_seed(3)
    rows = {row: torch.randint(10, 120, (n,), generator=generator).tolist() for row, n in ((1, FIRST), (2, SECOND))}
    return PackedRun(model, rows, max_len=128)


def prompts(run: PackedRun) -> ForwardBatch:
    """Both in one step."""
    ids = run.sequences[1] + run.sequences[2]
    return run.paged.batch([Part(1, 0, FIRST), Part(2, 0, SECOND)], 2, ids)


@pytest.mark.parametrize(
    "wanted",
    [[89, 96], [96], [89], [70, 89], [87, 88, 89, 95, 96], [0, 96], [90], list(range(97)), []],
    ids=["last", "of one", "of the other", "before it", "some last", "first", "in the midst", "all", "none"],
)
def test_any_tokens_may_be_wanted(run: PackedRun, path: Path, wanted: list[int]) -> None:
    plain = PlainModel(path)
    expected = torch.cat([plain.logits(run.sequences[row]) for row in (1, 2)])
    batch = prompts(run)
    batch.last_indices = torch.tensor(wanted, dtype=torch.int64)
    torch.testing.assert_close(run.model.forward(batch), expected[wanted], atol=1e-4, rtol=0)
    # What was left out had nothing to store: the next token of each finds all keys.
    run.sequences = {row: [*ids, 11] for row, ids in run.sequences.items()}
    got = run.step([Part(1, FIRST, 1), Part(2, SECOND, 1)], 0)
    want = torch.stack([plain.logits(run.sequences[row])[-1] for row in (1, 2)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (3,), (4,), (5,), (3, 1)])
@pytest.mark.parametrize("hidden", [False, True])
def test_states_that_are_wanted_are_those_of_all_tokens(
    run: PackedRun, path: Path, layers: tuple[int, ...], hidden: bool
) -> None:
    batch = prompts(run)
    batch.wants_layers, batch.wants_hidden = layers, hidden
    logits = run.model.forward(batch)
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        found = [module(torch.tensor([run.sequences[row]]), output_hidden_states=True) for row in (1, 2)]
    assert batch.layer_states is not None and (batch.hidden is not None) is hidden
    for place, layer in enumerate(layers):
        states = batch.layer_states.chunk(len(layers), -1)[place]
        if layer == 5:  # transformers gives what is normed instead
            states = module.model.norm(states).detach()
        want = torch.cat([each.hidden_states[layer][0] for each in found])
        torch.testing.assert_close(states, want, atol=1e-3, rtol=1e-3)
    if batch.hidden is not None:
        want = torch.cat([each.hidden_states[-1][0] for each in found])
        torch.testing.assert_close(batch.hidden, want, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(logits, torch.stack([each.logits[0, -1] for each in found]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"use_bidirectional_attention": "all"}, "attention in both directions"),
        ({"vocab_size_per_layer_input": 200}, "tokens that its layers have no inputs for"),
    ],
)
def test_what_native_code_does_not_compute_of_it(tmp_path: Path, changed: dict[str, object], reason: str) -> None:
    model = load_model(ModelConfig(str(make_checkpoint("gemma4_text", tmp_path / "model")), native="off"), CPU)
    assert isinstance(model, TransformersModel)
    for name, value in changed.items():
        setattr(model.module.config, name, value)
    with pytest.raises(NotDense, match=reason):
        check_declared(model.module, model.spec)


def test_a_decoder_of_a_gpu_leaves_it_to_the_modules(path: Path) -> None:
    model = load_model(ModelConfig(str(path), native="off"), CPU)
    assert isinstance(model, TransformersModel)
    with pytest.raises(NotDense, match="its values are normed"):
        check_alone(model.module, model.spec)


def test_keys_that_no_layer_before_has_are_refused(path: Path) -> None:
    model = load_model(ModelConfig(str(path), native="off"), CPU)
    assert isinstance(model, TransformersModel)
    model.module.config.layer_types[2:] = ["another"] * 3
    with pytest.raises(NotDense, match="keys that no layer before it has"):
        check_declared(model.module, model.spec)
