"""Every declared family gives natively what transformers gives, past its windows, in prompts, chunks and decode."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.attention.registry import build_attention
from core.config import ModelConfig
from core.memory.kv_pool import KVPool
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pool import SlidingWindowPool
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model
from core.models.native.families import FAMILIES
from core.models.native.family import UpgradingModel
from core.models.native.reading import NotDense
from core.models.native.weights import check_dense
from tests.support.fakes.paged_steps import PagedRows
from tests.support.native_cases import CASES, checkpoint_of
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel
from tests.unit.core.models.test_native_shapes import LONG, logits, sequences, steps

pytestmark = pytest.mark.usefixtures("native_code")


def test_every_family_is_tried() -> None:
    assert {case.partition(",")[0] for case in CASES} == set(FAMILIES)


def test_the_documentation_names_every_family() -> None:
    text = Path(__file__).parents[4].joinpath("docs/reference/models.md").read_text()
    listed = text.partition("<!-- native -->")[2].partition("<!-- end of native -->")[0]
    assert re.findall(r"`(\w+)`", listed) == list(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    path = checkpoint_of(case, tmp_path)
    plain, rows = PlainModel(path), sequences()
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    for got, (parts, _) in zip(logits(path, 2), steps(rows), strict=True):
        want = torch.stack([expected[p.row][p.prefix + p.extend - 1] for p in parts])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_windows_beside_chunks_are_left_to_transformers(tmp_path: Path) -> None:
    """A step's table of slots is translated for all layers that hide keys, or for none."""
    model = load_model(ModelConfig(str(checkpoint_of("llama4_text", tmp_path)), native="off"), CPU)
    assert isinstance(model, TransformersModel)
    check_dense(model.module, model.spec)
    first, second, *others = model.spec.kv_layers
    spec = replace(model.spec, kv_layers=(first, replace(second, window=8), *others))
    with pytest.raises(NotDense, match="some of its layers have windows and some have chunks"):
        check_dense(model.module, spec)


@pytest.mark.parametrize("case", ["gemma3_text", "cohere2", "olmo2", "gpt2", "gpt_neox", "youtu"])
def test_bfloat16_stays_within_rounding(case: str, tmp_path: Path) -> None:
    path = checkpoint_of(case, tmp_path)
    plain, rows = PlainModel(path, torch.bfloat16), sequences()
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    scale = max(float(found.abs().max()) for found in expected.values())
    for got, (parts, _) in zip(logits(path, 2, "bfloat16"), steps(rows), strict=True):
        want = torch.stack([expected[p.row][p.prefix + p.extend - 1] for p in parts])
        assert float((got - want).abs().max()) < 0.05 * scale


@pytest.mark.parametrize("case", ["gemma3_text", "gpt2", "gpt_neox", "opt", "phi3", "starcoder2", "qwen3_next"])
def test_int8_weights_give_what_transformers_makes_of_them(case: str, tmp_path: Path) -> None:
    """Fused, sorted by kind, gated or not."""
    path = checkpoint_of(case, tmp_path)
    plain = logits(path, 1, "float32", "int8", native="off")
    scale = max(float(found.abs().max()) for found in plain)
    for got, want in zip(logits(path, 2, "float32", "int8"), plain, strict=True):
        assert float((got - want).abs().max()) < 1e-4 * scale


class WindowedRun(PackedRun):
    """The windowed layers in pages of another pool, in another order."""

    def rebind(self) -> None:
        """See `PackedRun`."""
        spec, page = self.model.spec, self.paged.pool.page_size
        windowed = [layer for layer in spec.kv_layers if layer.window is not None]
        full = [layer for layer in spec.kv_layers if layer.window is None]
        self.paged = PagedRows(full, len(self.sequences) - 1, LONG + 2, page_size=page, seed=1)
        pages = self.paged.pool.num_pages
        pool = KVPool(windowed, pages, page, spec.dtype, CPU, WINDOW)
        # What no window shows any more may be anything.
        for layer in windowed:
            pool.k(layer.layer_id)[:] = pool.v(layer.layer_id)[:] = torch.nan
        self.windows = SlidingWindowPool(pool, pages)
        self.windows.table[1:] = torch.randperm(pages, generator=torch.Generator().manual_seed(2)) + 1
        self.model.bind(self.paged.pool, build_attention("auto", CPU), {WINDOW: self.windows})

    def forget(self, row: int, tokens: int) -> None:
        """Take the window pages of the first `tokens` of `row` away: NaN stands in their place."""
        page = self.paged.pool.page_size
        self.windows.table[(self.paged.table[row, : tokens // page * page] // page).long()] = 0


@pytest.mark.parametrize("case", ["gemma3_text", "cohere2"])
def test_windowed_layers_read_their_own_pool_and_nothing_behind_a_window(case: str, tmp_path: Path) -> None:
    path = checkpoint_of(case, tmp_path)
    plain, rows = PlainModel(path), sequences()
    model = load_model(ModelConfig(str(path), dtype="float32", native="wait"), CPU)
    assert isinstance(model, UpgradingModel) and model.native
    run = WindowedRun(model, rows, max_len=LONG + 2)
    for number, (parts, num_extend) in enumerate(steps(rows)):
        if number > 1:
            run.forget(1, parts[0].prefix + 1 - CASES[case]["sliding_window"])
        want = torch.stack([plain.logits(rows[p.row])[p.prefix + p.extend - 1] for p in parts])
        torch.testing.assert_close(run.step(parts, num_extend), want, atol=1e-4, rtol=0)
