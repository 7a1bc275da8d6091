"""Which hidden states of a step its model must give beside the logits: embeddings are made of them, and drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class HiddenRequest:
    """What is wanted of the T tokens that a step computes, whether they sample or not."""

    layers: tuple[int, ...] = ()
    """Sums of the residual stream: number i is what layer i reads, so 0 is what the embedding gave, and the number of
    layers is what the last layer left, before the final norm. In this order in `ForwardBatch.layer_states`."""
    final: bool = False
    """The last hidden states after the final norm, in `ForwardBatch.hidden`."""

    def __post_init__(self) -> None:
        assert all(layer >= 0 for layer in self.layers), self.layers

    def __bool__(self) -> bool:
        """Whether anything is wanted."""
        return self.final or bool(self.layers)


NO_HIDDEN: Final = HiddenRequest()
