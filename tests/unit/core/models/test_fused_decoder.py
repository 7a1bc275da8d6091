"""A fused decoder gives what transformers gives, in nine launches a layer, and shares all weights with its modules.

Its kernels stand in, in PyTorch (`tests/support/fakes/plain_kernels.py`); `test_fused_kernels.py` compares the real
ones with these. What is marked `interpreted` has the real ones, in the process of `attention/test_triton.py` and on
CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from core.attention.registry import build_attention
from core.config import ModelConfig
from core.memory.kv_e4m3 import FP8_E4M3
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.window.window_pages import NAME as WINDOW
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes import plain_kernels
from tests.support.fakes.grid_attention import GridAttention
from tests.support.fakes.masked_attention import MaskedAttention
from tests.support.fakes.paged_steps import Part
from tests.support.fakes.traced_graphs import TracedGraphs
from tests.support.interpreted import quick_calls
from tests.support.native_cases import CASES
from tests.unit.core.attention.test_conformance import INTERPRETED
from tests.unit.core.attention.test_grids import WIDTH, grid_batch
from tests.unit.core.attention.test_triton import interpreted, needs_triton
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel
from tests.unit.core.models.test_native_families import WindowedRun
from tests.unit.core.sampling.test_launches import Launches

if TYPE_CHECKING:
    from core.models.fused.decoder import FusedDecoder

pytestmark = needs_triton

LENGTH = 14
SHORT = {"sliding_window": 5, "attention_chunk_size": 5}
"""Spans that hide keys of so short a row."""
FAMILIES = (
    "llama qwen3 gemma2 gemma3_text phi gpt_neox cohere cohere2 glm4 olmo2 granite gptj stablelm starcoder2 "
    "hunyuan_v1_dense ministral3 smollm3 phi3 persimmon nemotron exaone4 vaultgemma hyperclovax"
).split()
ALONE = ["gpt_neox, one after the other", "stablelm, parallel"]
KERNELS = ["gemma3_text", "gpt_neox", "cohere2", "olmo2", "granite", "stablelm"]
"""Whole and partial rotation, pairs of neighbours, layers without any, norms of all kinds in all places."""
STEPS: list[tuple[list[Part], int]] = [
    ([Part(1, 0, 9), Part(2, 0, 4)], 2),
    ([Part(2, 4, 6), Part(1, 9, 1)], 1),
    ([Part(1, 10, 1), Part(2, 10, 1)], 0),
    ([Part(2, 11, 1), Part(1, 11, 1)], 0),
]
"""Prompts together, a chunk behind a prefix beside a decode row, decode, decode in another order."""
FEW: list[tuple[list[Part], int]] = [
    ([Part(1, 0, 4), Part(2, 0, 2)], 2),
    ([Part(2, 2, 3), Part(1, 4, 1)], 1),
    ([Part(1, 5, 1), Part(2, 5, 1)], 0),
]


def checkpoint(case: str, directory: Path) -> Path:
    changes = CASES[case] | {name: size for name, size in SHORT.items() if name in CASES[case]}
    return make_checkpoint(case.partition(",")[0], directory / "model", **changes)


def load(path: Path, dtype: str = "float32") -> TransformersModel:
    found = load_model(ModelConfig(str(path), dtype=dtype, native="off"), CPU)
    assert isinstance(found, TransformersModel)
    return found


def fused(model: TransformersModel) -> FusedDecoder:
    from core.models.fused.decoder import FusedDecoder

    return FusedDecoder(model.module, model.spec)


def sequences() -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(5)
    return {row: torch.randint(10, 120, (LENGTH,), generator=generator).tolist() for row in (1, 2)}


def worst(run: PackedRun, plain: PlainModel, steps: list[tuple[list[Part], int]] = STEPS) -> tuple[float, float]:
    """The largest difference of any logit of all steps, and the largest logit."""
    expected = {row: plain.logits(ids) for row, ids in sequences().items()}
    differences = []
    for parts, num_extend in steps:
        want = torch.stack([expected[p.row][p.prefix + p.extend - 1] for p in parts])
        differences.append(float((run.step(parts, num_extend) - want).abs().max()))
    return max(differences), max(float(each.abs().max()) for each in expected.values())


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        quick_calls(monkeypatch)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels.put_in_place(monkeypatch)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("case", [*FAMILIES, *ALONE])
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    path = checkpoint(case, tmp_path)
    assert worst(PackedRun(fused(load(path)), sequences()), PlainModel(path))[0] < 1e-4


@interpreted
@pytest.mark.parametrize("case", KERNELS)
def test_interpreted_decoder_equals_transformers(case: str, tmp_path: Path) -> None:
    path = checkpoint(case, tmp_path)
    run = PackedRun(fused(load(path)), sequences())
    run.model.bind(run.paged.pool, build_attention("triton", CPU))
    assert worst(run, PlainModel(path), FEW)[0] < 1e-4


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("case", ["llama", "gemma3_text", "olmo2", "granite", "phi"])
def test_bfloat16_rounds_where_the_modules_do(case: str, tmp_path: Path) -> None:
    """Not further from transformers, sequence by sequence, than its own layers are over pages."""
    path = checkpoint(case, tmp_path)
    model, plain = load(path, "bfloat16"), PlainModel(path, torch.bfloat16)
    theirs, scale = worst(PackedRun(model, sequences()), plain)
    decoder = fused(model)
    if case != "olmo2":
        angles: Any = decoder._layers[0]._attention._cos
        assert angles.dtype is torch.bfloat16, "rounded as those of the module"
    ours, _ = worst(PackedRun(decoder, sequences()), plain)
    assert ours < max(1.5 * theirs, 0.01 * scale), (ours, theirs, scale)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("case", ["llama", "phi"])
def test_hidden_states_and_those_of_layers_are_those_of_the_modules(case: str, tmp_path: Path) -> None:
    """Of all tokens, with the logits of one of them; and of the layers that are asked for, in that order."""
    model = load(checkpoint(case, tmp_path))
    found = []
    for each in (model, fused(model)):
        run = PackedRun(each, sequences())
        parts = [Part(1, 0, 9), Part(2, 0, 4)]
        ids = [token for p in parts for token in run.sequences[p.row][: p.extend]]
        batch = run.paged.batch(parts, 2, ids, sample=[1])
        batch.wants_hidden, batch.wants_layers = True, (2, 0, 1) if case == "llama" else ()
        logits = each.forward(batch)
        found.append([logits, batch.hidden, batch.layer_states])
        assert logits.shape[0] == 1 and logits.dtype is torch.float32
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("plainly")
def test_a_chunk_in_the_middle_of_a_prompt_has_no_logits(tmp_path: Path) -> None:
    run = PackedRun(fused(load(checkpoint("llama", tmp_path))), sequences())
    assert run.step([Part(1, 0, 5)], 1, sample=[]).shape == (0, 320)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_grids_of_drafts_give_the_logits_of_their_places(case: str, tmp_path: Path) -> None:
    path = checkpoint(case, tmp_path)
    run: Any = PackedRun(fused(load(path)), sequences())
    run.model.bind(run.paged.pool, GridAttention())
    run.step(*STEPS[0])
    parts = [Part(1, 9, 2), Part(2, 4, WIDTH)]
    batch = grid_batch(run, parts)
    ids = [token for p in parts for token in run.sequences[p.row][p.prefix : p.prefix + WIDTH]]
    batch.input_ids, batch.last_indices = torch.tensor(ids), torch.arange(len(ids))
    got, plain = run.model.forward(batch), PlainModel(path)
    assert got.isfinite().all()
    for place, part in enumerate(parts):
        want = plain.logits(run.sequences[part.row])[part.prefix : part.prefix + part.extend]
        torch.testing.assert_close(got[WIDTH * place :][: part.extend], want, atol=1e-4, rtol=0)


class Heard:
    """What a recorder of accesses is told."""

    def __init__(self) -> None:
        self.written: list[tuple[str, list[int]]] = []

    def wrote(self, name: str, slots: Any) -> None:
        self.written.append((name, slots.tolist()))


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("case", ["gemma3_text", "cohere2"])
def test_windowed_layers_have_a_pool_of_their_own(case: str, tmp_path: Path) -> None:
    path = checkpoint(case, tmp_path)
    run = WindowedRun(fused(load(path)), sequences())
    heard: Any = Heard()
    run.paged.pool.recorder = run.windows.recorder = heard
    assert worst(run, PlainModel(path))[0] < 1e-4
    slots = run.paged.table[[2, 1], 11].tolist()
    page = run.paged.pool.page_size
    theirs = [int(run.windows.table[slot // page]) * page + slot % page for slot in slots]
    assert dict(heard.written[-2:]) == {"kv": slots, WINDOW: theirs}, "both pools were written, where the step says"


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("case", ["llama", "starcoder2", "gpt_neox"])
def test_no_weight_is_held_twice_and_the_modules_go_on(case: str, tmp_path: Path) -> None:
    path = checkpoint(case, tmp_path)
    model, plain = load(path), PlainModel(path)
    decoder = fused(model)
    parameters = [each for each in model.module.parameters() if each.dim() > 1]
    theirs = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in parameters}
    assert sum(theirs.values()) == sum(each.numel() * each.element_size() for each in parameters)
    held = [decoder._embedding, decoder._head.weight]
    for layer in decoder._layers:
        attention = layer._attention
        held += [attention._qkv.weight, attention._out.weight, layer._into.weight, layer._down.weight]
    assert {each.untyped_storage().data_ptr() for each in held} == set(theirs)
    assert worst(PackedRun(model, sequences()), plain)[0] < 1e-4


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt_neox"])
def test_over_codes_logits_are_those_of_the_layers_of_transformers(case: str, tmp_path: Path) -> None:
    model = load(checkpoint(case, tmp_path))
    over_codes(model, "auto", STEPS)


def over_codes(model: TransformersModel, attention: str, steps: list[tuple[list[Part], int]]) -> None:
    """Numbers that differ by rounding may have neighbouring codes: logits are near each other, and plain ones far."""
    found = []
    for each, format in ((model, FP8_E4M3), (fused(model), FP8_E4M3), (model, PLAIN)):
        run = PackedRun(each, sequences(), format=format)
        each.bind(run.paged.pool, build_attention(attention, CPU))
        found.append(torch.cat([run.step(*step).float() for step in steps]))
    theirs, ours, plain = found
    assert (ours - theirs).square().mean() < (plain - theirs).square().mean() / 4


@pytest.mark.parametrize("case", [*FAMILIES, *ALONE])
def test_a_layer_of_a_decode_step_takes_nine_launches(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_nine(case, tmp_path, monkeypatch)


def test_a_layer_over_codes_takes_nine_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes_nine("llama", tmp_path, monkeypatch, FP8_E4M3)


def takes_nine(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: KVFormat = PLAIN) -> None:
    """As on a GPU: launches of our kernels, and operations of PyTorch that are no views."""
    from core.attention.triton.backend import TritonAttention
    from tests.support.fakes.compiled_kernels import compiling

    counts = []
    for layers in (2, 4):
        changes = {"num_hidden_layers": layers, "n_layer": layers} | no_types(CASES[case], layers)
        path = make_checkpoint(case.partition(",")[0], tmp_path / str(layers), **CASES[case] | changes)
        run = PackedRun(fused(load(path)), sequences(), format=format)
        run.model.bind(run.paged.pool, TritonAttention())
        batch = run.paged.batch(*STEPS[2], [7, 9])
        with compiling(monkeypatch) as kernels:
            run.model.forward(batch)
            kernels.launches.clear()
            with Launches() as launches:
                run.model.forward(batch)
        aside = [name for name in launches.names if not name.startswith(OURS)]
        counts.append(sum(kernels.launches.values()) + len(aside))
    assert (counts[1] - counts[0]) / 2 == (8 if case in PARALLEL else 9), counts
    most = 6 + 2 * (case in ("gemma2", "vaultgemma"))
    assert counts[0] - 2 * 9 <= most, "embedding, multiplier, wanted rows, head, multiplier; logits that are capped"
    assert kernels.launches["_decode_split"] == 4 and not kernels.launches["_merge_splits"]


OURS = ("add_norm", "enter_heads", "activate", "paged_decode", "store_kv")
PARALLEL = ("phi", "gpt_neox", "cohere", "cohere2", "gptj", "stablelm, parallel")
"""Their layers add once."""


def no_types(changes: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same types of layers, for so many of them."""
    lists = {name: value for name, value in changes.items() if name in ("layer_types", "no_rope_layers")}
    return {name: (value * layers)[:layers] for name, value in lists.items()}


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("case", ["llama", "gemma2", "gptj", "stablelm, parallel"])
def test_captured_steps_equal_others(case: str, tmp_path: Path) -> None:
    """Another step in the same tensors is what a replay computes: nothing of the first was kept by the host."""
    run = PackedRun(fused(load(checkpoint(case, tmp_path))), sequences())
    captured_equals(run, MaskedAttention())


@interpreted
def test_interpreted_captured_steps_equal_others(tmp_path: Path) -> None:
    run = PackedRun(fused(load(checkpoint("llama", tmp_path))), sequences())
    captured_equals(run, build_attention("triton", CPU))


def captured_equals(run: PackedRun, attention: Any) -> None:
    run.model.bind(run.paged.pool, attention)
    for parts, num_extend in STEPS[:2]:
        run.step(parts, num_extend)
    static, later = (run.paged.batch(parts, 0, [5, 6]) for parts, _ in STEPS[2:])
    run.model.forward(static)
    want = run.model.forward(later).clone()
    logits = torch.zeros_like(want)

    def work() -> None:
        logits.copy_(run.model.forward(static))

    with torch.inference_mode():
        graph: Any = TracedGraphs().capture(work)
        assert not torch.allclose(logits, want, atol=1e-3), "another step"
        for name in ("input_ids", "positions", "rows", "seq_lens", "out_cache_loc"):
            getattr(static, name).copy_(getattr(later, name))
        for _ in range(2):
            graph.replay()
            torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)
