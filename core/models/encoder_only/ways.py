"""Two ways to run an encoder over the texts of a step: all packed into one row, or those of one length side by side.

The first needs a model that takes positions and attends through transformers' interface, or attention that is declared.
The second is for what is left: as right, and slower.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from core.models.encoder_only.packed_encoder import EncoderContext
from core.models.hf.packed_attention import CONTEXT
from core.models.hf.products import Attend


class Way(Protocol):
    """Computes hidden states of whole texts."""

    offset: int
    """Of the first position: RoBERTa's is behind the one of its padding."""

    def longest_by_torch(self, lens: Sequence[int]) -> int | None:
        """Tokens of the longest of texts of `lens` that torch attends to alone; None where it attends to many."""
        ...

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None, lens: Sequence[int]
    ) -> torch.Tensor:
        """[T, H]: the last hidden states of texts of `lens` tokens, one behind the other.

        `ids`, `positions` (in each text, from 0) and `types`: int64[T].
        """
        ...

    def over(self, base: PreTrainedModel) -> Way:
        """The same for `base`, a copy of the model with everything that was put on its modules."""
        ...

    def attend_by(self, attend: Attend) -> None:
        """Have `attend` compute what it can of attention, from the next step on."""
        ...


class PackedTexts:
    """All texts in one row, of which only attention knows where one ends (`packed_encoder`)."""

    def __init__(self, base: PreTrainedModel, context: EncoderContext, offset: int) -> None:
        self._base, self._context, self.offset = base, context, offset
        takes = inspect.signature(base.forward).parameters
        # Some have a table of places by themselves, and types of as many tokens as a text may have, not a step.
        self._takes_places, self._takes_types = "position_ids" in takes, "token_type_ids" in takes

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None, lens: Sequence[int]
    ) -> torch.Tensor:
        """See `Way`."""
        self._context.begin(lens)
        named: dict[str, Any] = {}
        if self._takes_types:
            named["token_type_ids"] = torch.zeros_like(ids)[None] if types is None else types[None]
        if self._takes_places:
            named["position_ids"] = (positions + self.offset)[None]
        output: Any = self._base(input_ids=ids[None], **named)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def over(self, base: PreTrainedModel) -> PackedTexts:
        """See `Way`."""
        return PackedTexts(base, getattr(base, CONTEXT), self.offset)

    def attend_by(self, attend: Attend) -> None:
        """See `Way`."""
        self._context.attend = attend

    def longest_by_torch(self, lens: Sequence[int]) -> int:
        """See `Way`."""
        return self._context.longest_by_torch(lens)


class GroupedTexts:
    """Texts of one length side by side, by the model's own attention: for what cannot be packed, and slower."""

    def __init__(self, base: PreTrainedModel, offset: int) -> None:
        """`offset`: how many of the positions that the configuration names are never used."""
        self._base, self.offset = base, offset

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None, lens: Sequence[int]
    ) -> torch.Tensor:
        """See `Way`. The model counts positions by itself."""
        parts, kinds = ids.split(list(lens)), None if types is None else types.split(list(lens))
        found: dict[int, torch.Tensor] = {}
        for places in groups(lens):
            rows = torch.stack([parts[place] for place in places])
            named = {} if kinds is None else {"token_type_ids": torch.stack([kinds[place] for place in places])}
            output: Any = self._base(input_ids=rows, attention_mask=torch.ones_like(rows), **named)
            found.update(zip(places, output.last_hidden_state, strict=True))
        return torch.cat([found[place] for place in range(len(lens))])

    def over(self, base: PreTrainedModel) -> GroupedTexts:
        """See `Way`."""
        return GroupedTexts(base, self.offset)

    def attend_by(self, attend: Attend) -> None:
        """Nothing: the model attends by itself."""

    def longest_by_torch(self, lens: Sequence[int]) -> None:
        """See `Way`."""


def groups(lens: Sequence[int]) -> list[list[int]]:
    """Places of the texts of each length, longest first."""
    found: dict[int, list[int]] = {}
    for place in sorted(range(len(lens)), key=lambda each: -lens[each]):
        found.setdefault(lens[place], []).append(place)
    return list(found.values())
