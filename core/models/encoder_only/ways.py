"""Two ways to run an encoder over the texts of a step: all packed into one row, or those of one length side by side.

Neither has padding. The first needs a model that takes positions and attends through transformers' interface; the
second is for all others, whose products are then as small as the groups are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from core.models.encoder_only.packed_encoder import EncoderContext
from core.models.hf.packed_attention import CONTEXT


class Way(Protocol):
    """Computes hidden states of whole texts."""

    offset: int
    """Of the first position: RoBERTa's is behind the one of its padding."""

    def states(self, ids: torch.Tensor, types: torch.Tensor | None, lens: Sequence[int]) -> torch.Tensor:
        """[T, H]: the last hidden states of texts of `lens` tokens, one behind the other. `ids`, `types`: int64[T]."""
        ...

    def over(self, base: PreTrainedModel) -> Way:
        """The same for `base`, a copy of the model with everything that was put on its modules."""
        ...


class PackedTexts:
    """All texts in one row, of which only attention knows where one ends (`packed_encoder`)."""

    def __init__(self, base: PreTrainedModel, context: EncoderContext, offset: int) -> None:
        self._base, self._context, self.offset = base, context, offset

    def states(self, ids: torch.Tensor, types: torch.Tensor | None, lens: Sequence[int]) -> torch.Tensor:
        """See `Way`."""
        self._context.begin(lens)
        positions = torch.cat([torch.arange(length) for length in lens]).to(ids.device)
        named: dict[str, Any] = {} if types is None else {"token_type_ids": types[None]}
        output: Any = self._base(input_ids=ids[None], position_ids=(positions + self.offset)[None], **named)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def over(self, base: PreTrainedModel) -> PackedTexts:
        """See `Way`."""
        return PackedTexts(base, getattr(base, CONTEXT), self.offset)


class GroupedTexts:
    """Texts of the same length in one call, by the model's own attention."""

    def __init__(self, base: PreTrainedModel, offset: int) -> None:
        """`offset`: how many of the positions that the configuration names are never used."""
        self._base, self.offset = base, offset

    def states(self, ids: torch.Tensor, types: torch.Tensor | None, lens: Sequence[int]) -> torch.Tensor:
        """See `Way`."""
        parts = list(ids.split(list(lens)))
        kinds = None if types is None else types.split(list(lens))
        found: dict[int, torch.Tensor] = {}
        for length in dict.fromkeys(lens):
            places = [place for place, each in enumerate(lens) if each == length]
            group = torch.stack([parts[place] for place in places])
            named: dict[str, Any] = {"attention_mask": torch.ones_like(group)}
            if kinds is not None:
                named["token_type_ids"] = torch.stack([kinds[place] for place in places])
            output: Any = self._base(input_ids=group, **named)
            found.update(zip(places, output.last_hidden_state, strict=True))
        return torch.cat([found[place] for place in range(len(lens))])

    def over(self, base: PreTrainedModel) -> GroupedTexts:
        """See `Way`."""
        return GroupedTexts(base, self.offset)
