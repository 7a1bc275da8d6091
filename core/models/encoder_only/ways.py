"""Two ways to run an encoder over the texts of a step: all packed into one row, or a few side by side.

The first has no padding, and needs a model that takes positions and attends through transformers' interface. The second
is for all others; where padding is seen by no other token, texts of nearly one length share a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from core.models.encoder_only.packed_encoder import EncoderContext
from core.models.hf.packed_attention import CONTEXT

CALL_TOKENS: Final = 64
"""Tokens of padding that are worth a call less."""
PADDED_SHARE: Final = 0.05
"""And more of them, by how many tokens there are."""


class Way(Protocol):
    """Computes hidden states of whole texts."""

    offset: int
    """Of the first position: RoBERTa's is behind the one of its padding."""

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


class PackedTexts:
    """All texts in one row, of which only attention knows where one ends (`packed_encoder`)."""

    def __init__(self, base: PreTrainedModel, context: EncoderContext, offset: int) -> None:
        self._base, self._context, self.offset = base, context, offset

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None, lens: Sequence[int]
    ) -> torch.Tensor:
        """See `Way`."""
        self._context.begin(lens)
        named: dict[str, Any] = {} if types is None else {"token_type_ids": types[None]}
        output: Any = self._base(input_ids=ids[None], position_ids=(positions + self.offset)[None], **named)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def over(self, base: PreTrainedModel) -> PackedTexts:
        """See `Way`."""
        return PackedTexts(base, getattr(base, CONTEXT), self.offset)


class GroupedTexts:
    """Texts side by side, by the model's own attention: of one length, or padded to the longest of a few."""

    def __init__(self, base: PreTrainedModel, offset: int, pad: int | None = None) -> None:
        """`offset`: how many of the positions that the configuration names are never used.

        `pad`: a token behind texts that are shorter, which other tokens do not see; None for a model in which they do.
        """
        self._base, self.offset, self.pad = base, offset, pad

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None, lens: Sequence[int]
    ) -> torch.Tensor:
        """See `Way`. The model counts positions by itself."""
        parts, kinds = ids.split(list(lens)), None if types is None else types.split(list(lens))
        found: dict[int, torch.Tensor] = {}
        for places in groups(lens, padded=self.pad is not None):
            states = self.together([parts[place] for place in places], kinds and [kinds[place] for place in places])
            found.update((place, each[: lens[place]]) for place, each in zip(places, states, strict=True))
        return torch.cat([found[place] for place in range(len(lens))])

    def together(self, texts: Sequence[torch.Tensor], types: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """[B, n, H]: the states of B texts, int64[<= n] each, those of padding included."""
        named: dict[str, Any] = {"attention_mask": pad_sequence([torch.ones_like(each) for each in texts], True)}
        if types is not None:
            named["token_type_ids"] = pad_sequence(list(types), True)
        output: Any = self._base(input_ids=pad_sequence(list(texts), True, self.pad or 0), **named)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def over(self, base: PreTrainedModel) -> GroupedTexts:
        """See `Way`."""
        return GroupedTexts(base, self.offset, self.pad)


def groups(lens: Sequence[int], *, padded: bool) -> list[list[int]]:
    """Places of the texts of each call, longest first: of one length, unless they may be `padded`.

    Then as many as cost less in padding than another call would: some models compute as much for each call as for
    hundreds of tokens.
    """
    found: list[list[int]] = []
    wasted = tokens = 0
    for place in sorted(range(len(lens)), key=lambda each: -lens[each]):
        short = lens[found[-1][0]] - lens[place] if found else 0
        fits = wasted + short <= CALL_TOKENS + PADDED_SHARE * (tokens + lens[place]) if padded else not short
        if not found or not fits:
            found.append([])
            wasted = tokens = short = 0
        found[-1].append(place)
        wasted, tokens = wasted + short, tokens + lens[place]
    return found
