"""All that a step brings to the host comes in one copy, each tensor as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.device.fetch import fetch_together
from core.device.streams import DeviceStreams

WIDE = torch.arange(12).reshape(3, 4)
TENSORS = {
    "flags first": [torch.tensor([True, False, True]), torch.tensor([5, -1]), torch.tensor([0.5])],
    "columns of a table": [WIDE[:, 1], WIDE.float().T, WIDE[:2] > 3],
    "nothing in one": [torch.empty(0, dtype=torch.int64), torch.tensor([True]), torch.empty(2, 0), torch.tensor([3.5])],
    "one alone": [torch.tensor([7, 8])],
    "none": [],
}


class Copies(TorchDispatchMode):
    """Counts copies into host memory that was handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_any_dtype_arrive_as_they_were_in_one_copy(kind: str) -> None:
    tensors = TENSORS[kind]
    with Copies() as copies:
        try:
            arrived = fetch_together(tensors, lambda size: torch.empty(size, dtype=torch.uint8))
        except RuntimeError as error:
            pytest.fail(f"a tensor begins where its type may not: {error}")
    assert copies.count == (1 if tensors else 0)
    assert [each.dtype for each in arrived] == [each.dtype for each in tensors]
    assert all(torch.equal(got, each) for got, each in zip(arrived, tensors, strict=True))


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.tensor([1, 2])
    (host,) = DeviceStreams(torch.device("cpu")).fetch([tensor])
    assert host is tensor
