"""Products whose sums are made where they belong give the bits of those that go through a buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def crew(products_code: Any) -> Any:
    return products_code.Crew(2, False)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("inputs", [64, 600, 1_100])
@pytest.mark.parametrize("rows", [1, 7, 50, 130, 300])
def test_whole_panels_equal_those_beside_a_panel_that_is_not(
    products_code: Any, crew: Any, rows: int, inputs: int, biased: bool
) -> None:
    """One output more makes a panel of one, so all of that product goes the other way."""
    rng = torch.Generator().manual_seed(rows * inputs)
    x, weight = torch.randn(rows, inputs, generator=rng), torch.randn(193, inputs, generator=rng)
    bias = torch.randn(193, generator=rng) if biased else None
    other = products_code.Product(crew, False, weight, None, bias)(x)
    straight = products_code.Product(crew, False, weight[:192], None, None if bias is None else bias[:192])
    found = straight(x)
    assert torch.equal(found, other[:, :192])
    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), want[:, :192], atol=1e-3, rtol=0)
    assert torch.equal(straight(x[-1]), found[-1]), "a row does not depend on the rows beside it"
