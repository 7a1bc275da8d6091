"""Layers of experts in which the rows of several engines meet.

Each engine attends and routes for its own rows. In a layer of experts it gets the rows of all, computes what its own
experts make of them, and gets back the sums of its own rows. vLLM
has a backend that does the same by all-gather and reduce-scatter.

An engine without a step has rows in none of the layers and runs only these, since the others' rows need its experts.
vLLM and SGLang run a whole step there, over a dummy or an empty batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from core.invariants import check
from core.models.experts.exchange import Exchange


class ExpertLayers:
    """The layers of experts of one model, in the order in which a forward pass calls them, each once."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._layers: list[SharedExperts] = []
        self._sizes: list[int] = []
        self._next = 0

    def implementation(self, module: torch.nn.Module, *_meshes: object) -> SharedExperts:
        """What `transformers` calls in place of the experts in `module`: an `EPImplementation` of theirs."""
        made = SharedExperts(module, self)
        self._layers.append(made)
        return made

    def arrange(self, model: torch.nn.Module) -> None:
        """Put the layers in the order that they have in `model`."""
        places = {id(module): place for place, module in enumerate(model.modules())}
        self._layers.sort(key=lambda each: places[id(each.module)])
        for place, each in enumerate(self._layers):
            each.place = place

    def sizes(self, place: int, rows: int) -> list[int]:
        """How many rows each engine brings to the layer at `place`, as told in the first layer of the pass."""
        if place == 0:
            self._sizes = self.exchange.sizes(rows)
        else:
            check("expert_layers", place == self._next, place=place, expected=self._next)
            check("expert_layers", rows == self._sizes[self.exchange.rank], rows=rows, sizes=self._sizes)
        self._next = place + 1
        return self._sizes

    @torch.inference_mode()
    def idle(self) -> None:
        """Take part in a forward pass of the others, without rows. A pass with rows must have been before."""
        for each in self._layers:
            each.idle()


class SharedExperts:
    """One layer of experts, of which this engine has some."""

    def __init__(self, module: Any, layers: ExpertLayers) -> None:
        """`module` has the weights of this engine's experts, and their number as `num_experts`."""
        self.module = module
        self.place = 0
        self._layers = layers
        self._compute: Callable[..., torch.Tensor] = module.forward
        self._own: int = module.num_experts
        self._none: tuple[torch.Tensor, ...] = ()

    def __call__(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[n, H]: the weighted sums of what the experts make of `hidden`, [n, H].

        experts: int64[n, K], of all that the model has; weights: [n, K]. Raises RuntimeError once an engine is gone.
        """
        exchange = self._layers.exchange
        if not self._none:
            self._none = tuple(each.new_empty((0, each.shape[1])) for each in (hidden, experts, weights))
        sizes = self._layers.sizes(self.place, hidden.shape[0])
        hidden, experts, weights = _gathered(exchange, (hidden, experts, weights), sizes)
        elsewhere = experts // self._own != exchange.rank
        # What `transformers` calls a sentinel: the number behind the last expert that is here.
        local = torch.where(elsewhere, self._own, experts % self._own)
        return exchange.reduce(self._compute(hidden, local, weights.masked_fill(elsewhere, 0.0)), sizes)

    def idle(self) -> None:
        """Compute for the others' rows."""
        self.module(*self._none)


def _gathered(exchange: Exchange, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """`tensors` of the same number of rows, each with the rows of all engines; as one transfer."""
    rows = [each.contiguous().view(torch.uint8) for each in tensors]
    parts = exchange.gather(torch.cat(rows, dim=1), sizes).split([each.shape[1] for each in rows], dim=1)
    return tuple(part.contiguous().view(each.dtype) for part, each in zip(parts, tensors, strict=True))
