"""One buffer for all matrices of an adapter: each where matrix products are quick, none over another."""

from __future__ import annotations

import pytest
import torch

from core.models.lora.packed import ALIGN_BYTES, Delta, pack

SHAPES = {"first": (3, 5, 7), "second": (1, 1, 1), "third": (2, 33, 9)}
"""Rank, inputs and outputs of modules whose matrices end nowhere near a boundary."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_any_size_begin_at_boundaries_and_keep_what_they_hold(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).to(dtype)

    deltas = {name: Delta(draw(rank, i), draw(o, rank)) for name, (rank, i, o) in SHAPES.items()}
    adapter = pack(deltas, pin=False)
    for name, found in adapter.deltas(torch.device("cpu")).items():
        for got, want in ((found.a, deltas[name].a), (found.b, deltas[name].b)):
            assert torch.equal(got, want), name
            assert (got.data_ptr() - adapter.buffer.data_ptr()) % ALIGN_BYTES == 0, name
    assert adapter.rank == 3
    assert adapter.nbytes % ALIGN_BYTES == 0
