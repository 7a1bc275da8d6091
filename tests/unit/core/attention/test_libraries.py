"""Backends around libraries that need a GPU: they call what is documented, and say what they lack."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from core.attention import varlen_backend
from core.attention.base import AttentionBackend
from core.attention.paged_library import PagedLibraryAttention
from core.attention.registry import build_attention
from core.attention.torch_native import TorchNativeAttention
from core.errors import ConfigError
from tests.support.fakes.attention_libraries import BatchPrefillWithPagedKVCacheWrapper, Varlen, fake_flashinfer
from tests.support.fakes.paged_steps import Part
from tests.unit.core.attention.dense import LAYER, KnownRows, Shape
from tests.unit.core.attention.test_conformance import SHAPES, check, random_parts

CPU = torch.device("cpu")
FLASHINFER = "core.attention.flashinfer_backend"


@pytest.fixture(params=["varlen", "varlen-paged", "flashinfer"])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AttentionBackend, Any]]:
    """A backend over its stand-in, which takes float32 and any width, and a count of its calls."""
    monkeypatch.setattr(PagedLibraryAttention, "dtypes", (torch.float32, torch.bfloat16))
    if request.param == "flashinfer":
        monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
        monkeypatch.delitem(sys.modules, FLASHINFER, raising=False)
        from core.attention import flashinfer_backend

        monkeypatch.setattr(flashinfer_backend, "WIDTHS", (16, 64))
        monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plans", 0)
        yield flashinfer_backend.FlashInferAttention(), lambda: BatchPrefillWithPagedKVCacheWrapper.plans
        sys.modules.pop(FLASHINFER, None)
        return
    library = Varlen()
    monkeypatch.setattr(varlen_backend, "varlen_attn", library)
    monkeypatch.setattr(varlen_backend, "reads_pages", lambda: request.param == "varlen-paged")
    yield varlen_backend.VarlenAttention(), lambda: library.calls
    assert library.paged == (library.calls if request.param == "varlen-paged" else 0)


@pytest.mark.parametrize("name", SHAPES)
def test_random_mixed_steps_match_the_formula(stand_in: tuple[AttentionBackend, Any], name: str) -> None:
    backend, calls = stand_in
    shape = SHAPES[name]
    rows = KnownRows(shape, num_rows=5, max_len=40, page_size=4, seed=1)
    check(rows, backend, *random_parts(1, rows.num_rows, rows.max_len))
    plain = not (shape.sinks or shape.bias or shape.chunk) and shape.k_dim == shape.v_dim
    capped = isinstance(backend, varlen_backend.VarlenAttention) and shape.softcap is not None
    assert (calls() > 0) == (plain and not capped), "the library does what it can, and only that"


def test_layers_share_a_plan_and_a_new_step_makes_another(stand_in: tuple[AttentionBackend, Any]) -> None:
    backend, calls = stand_in
    rows = KnownRows(Shape(), num_rows=3, max_len=20, page_size=4, seed=1)
    # As many rows and tokens as before, so that nothing but its answers would tell of a step that is over.
    for steps, parts in enumerate(([Part(1, 0, 7), Part(3, 9, 1)], [Part(2, 11, 7), Part(1, 12, 1)]), start=1):
        rows.fill(parts)
        q, k, v = (
            torch.cat([source[p.row, p.prefix : p.prefix + p.extend] for p in parts]).transpose(0, 1)
            for source in (rows.q, rows.k, rows.v)
        )
        backend.plan(rows.paged.batch(parts, num_extend=1))
        for _ in range(2):
            got = backend.forward(LAYER, q, k, v, scale=rows.scale)
            assert (got.double() - rows.expected(parts)).abs().max() < 1e-5
        assert calls() == (2 * steps if isinstance(backend, varlen_backend.VarlenAttention) else steps)


def test_without_its_library_or_device_each_says_why() -> None:
    with pytest.raises(ConfigError, match=r"varlen.*cpu.*need CUDA"):
        build_attention("varlen", CPU)
    with pytest.raises(ConfigError, match=r"flashinfer.*cannot be imported.*flashinfer"):
        build_attention("flashinfer", CPU)


def test_a_pytorch_without_pages_is_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> None: ...

    monkeypatch.setattr(varlen_backend, "varlen_attn", old)
    assert "2.12" in str(varlen_backend.VarlenAttention.why_not(torch.device("cuda")))


def test_none_of_them_is_captured() -> None:
    assert not PagedLibraryAttention.graph_safe and not TorchNativeAttention.graph_safe
