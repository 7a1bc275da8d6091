"""Attention of an encoder over the packed tokens of many texts: each text sees itself, and there is no padding.

transformers calls the registered function with the attention module first; `bind_context` has put the model's own
`EncoderContext` on it. No mask function is registered under the same name, so that transformers builds no masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AttentionInterface

from core.models.hf.packed_attention import CONTEXT

IMPLEMENTATION: Final = "slipstream-encoder"
"""Name under which transformers finds `encoder_attention`."""
BLOCKS: Final = 4
"""Queries that share their keys, as a multiple of the window: more of them read fewer keys twice, and mask more."""
CALL_TOKENS: Final = 64
"""Tokens of short texts that are attended to in one call: a call costs more than what its mask hides."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Texts of one call: the first token, the place behind the last one, and who sees whom."""

    start: int
    end: int
    longest: int
    """Tokens of the longest text."""
    mask: torch.Tensor | None
    """[T, T], added to scores: nothing within a text, and minus infinity between two. None where there is one text."""


@dataclass(slots=True)
class EncoderContext:
    """What the attention function of one model needs to know of the step. One per model, on one thread."""

    windows: dict[torch.nn.Module, int] = field(default_factory=dict)
    """Attention module -> how far it sees in both directions; modules that see everything are not in it."""
    stretches: tuple[Stretch, ...] = ()

    def begin(self, lens: Sequence[int], like: torch.Tensor) -> None:
        """Start a step of texts of `lens` tokens each, whose queries are of the device and type of `like`."""
        stretches, start = list[Stretch](), 0
        for together in _calls(lens):
            end = start + sum(together)
            mask = _apart(together, like) if len(together) > 1 else None
            stretches.append(Stretch(start, end, max(together), mask))
            start = end
        self.stretches = tuple(stretches)


def _calls(lens: Sequence[int]) -> list[list[int]]:
    """The texts of each call, in order: as many as have room."""
    calls = list[list[int]]()
    held = CALL_TOKENS
    for length in lens:
        held += length
        if held > CALL_TOKENS:
            calls.append([])
            held = length
        calls[-1].append(length)
    return calls


def _apart(lens: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    text = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens))
    mask = torch.zeros(len(text), len(text), dtype=like.dtype)
    return mask.masked_fill_(text[:, None] != text, -torch.inf).to(like.device)


def encoder_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention call for packed texts: query [1, H, T, D], key and value [1, Hkv, T, D or Dv].

    Returns [1, T, H, Dv] and no weights. Raises NotImplementedError for options that change what is attended to.
    """
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attends with {name}, which encoders here do not")
    context: EncoderContext = getattr(module, CONTEXT)
    window = context.windows.get(module)
    attended = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for each in context.stretches:
        tokens = slice(each.start, each.end)
        parts = query[:, :, tokens], key[:, :, tokens], value[:, :, tokens]
        out = attended[:, tokens].transpose(1, 2)
        if window is None or each.longest <= window:
            _attend(*parts, scaling, out, each.mask)
        else:
            _attend_near(*parts, scaling, window, out, each.mask)
    return attended, None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    out: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    gqa = query.shape[1] != key.shape[1]
    out.copy_(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa))


def _attend_near(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int,
    out: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """`_attend`, where each token sees those at most `window` before and behind it: block by block of the queries."""
    length, size = query.shape[2], BLOCKS * window
    for first in range(0, length, size):
        behind = min(first + size, length)
        low, high = max(0, first - window), min(length, behind + window)
        queries = torch.arange(first, behind, device=query.device)[:, None]
        keys = torch.arange(low, high, device=query.device)[None]
        near = (queries - keys).abs() <= window
        if mask is not None:
            near &= mask[first:behind, low:high] == 0
        parts = query[:, :, first:behind], key[:, :, low:high], value[:, :, low:high]
        _attend(*parts, scaling, out[:, :, first:behind], near)


AttentionInterface.register(IMPLEMENTATION, encoder_attention)
