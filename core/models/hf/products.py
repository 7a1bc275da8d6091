"""What may compute the products of a module tree instead of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Attend(Protocol):
    """Computes attention of texts that are seen whole. Forward thread only."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        places: Sequence[tuple[int, int]],
        scale: float,
        out: torch.Tensor,
        distances: torch.Tensor | None = None,
        /,
    ) -> None:
        """Write to `out` [1, T, H, D] what each token between two of `places` sees of all that are between them.

        `query` [1, H, T, D], `key` and `value` [1, Hkv, T, D]. `distances`: float32[H, 2N - 1] that is added to scores
        once they are scaled, from a key N - 1 places before its query to one as many behind it.
        """
        ...


class Products(Protocol):
    """Those of one model, from a step on that they choose. Forward thread only."""

    def begin(self, tokens: int, longest: int | None = None) -> None:
        """Call before the modules run over `tokens` of them; `longest`: of the longest text that torch
        attends to, where it attends to each alone."""
        ...

    def end(self) -> None:
        """Call after they ran."""
        ...
