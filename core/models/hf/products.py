"""What may compute the products of a module tree instead of torch."""

from __future__ import annotations

from typing import Protocol


class Products(Protocol):
    """Those of one model, from a step on that they choose. Forward thread only."""

    def begin(self, tokens: int, longest: int | None = None) -> None:
        """Call before the modules run over `tokens` of them; `longest`: of the longest text, where each is alone."""
        ...

    def end(self) -> None:
        """Call after they ran."""
        ...
