"""What may compute the products of a module tree instead of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[tuple[int, int]], float, torch.Tensor], None]
"""(query [1, H, T, D], key and value [1, Hkv, T, D], places of texts and of their ends, scale, out [1, T, H, D]):
writes what each token of these texts sees of all of its own text."""


class Products(Protocol):
    """Those of one model, from a step on that they choose. Forward thread only."""

    def begin(self, tokens: int, longest: int | None = None) -> None:
        """Call before the modules run over `tokens` of them; `longest`: of the longest text that torch
        attends to, where it attends to each alone."""
        ...

    def end(self) -> None:
        """Call after they ran."""
        ...
