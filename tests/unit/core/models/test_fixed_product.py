"""Products of deterministic fused decoders: right, and a row has the same bits among any number of rows.

What is marked `interpreted` runs in the process of `attention/test_triton.py`, and on a CUDA device.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreted import quick_calls
from tests.unit.core.attention.test_conformance import DEVICE, INTERPRETED
from tests.unit.core.attention.test_triton import interpreted, needs_triton

pytestmark = needs_triton

ROWS = 67
"""One tile, and a few rows of another."""


@interpreted
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "biased"), [(40, 96, True), (32, 130, False)])
def test_interpreted_products_of_a_row_are_its_own(
    dtype: torch.dtype, tolerance: float, outputs: int, inputs: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core.models.fused.product import FixedProduct

    if INTERPRETED:
        quick_calls(monkeypatch)
    x, weight, bias = (
        torch.randn(size, device=DEVICE).to(dtype) for size in ((ROWS, inputs), (outputs, inputs), outputs)
    )
    product = FixedProduct(weight, bias if biased else None)
    many = product(x)
    wanted = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    assert many.dtype == dtype
    assert float((many.double() - wanted).abs().max()) < tolerance * float(wanted.abs().max())
    for rows in ([0], [66], [65, 3], list(range(7, 40))):
        assert torch.equal(product(x[rows]), many[rows]), rows
    assert product(x[:0]).shape == (0, outputs), "a chunk in the middle of a prompt has no logits"
