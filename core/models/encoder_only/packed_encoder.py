"""Attention of an encoder over the packed tokens of many texts: each text sees itself, and there is no padding.

Short texts of one length are attended to in one call: for a few tokens a call costs more than what it computes.

transformers calls the registered function with the attention module first; `bind_context` has put the model's own
`EncoderContext` on it. No mask function is registered under the same name, so that transformers builds no masks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AttentionInterface

from core.models.hf.packed_attention import CONTEXT

IMPLEMENTATION: Final = "slipstream-encoder"
"""Name under which transformers finds `encoder_attention`."""
SHORT: Final = 128
"""Tokens of the longest texts that share calls: what longer ones compute takes far longer than a call."""
BLOCKS: Final = 4
"""Queries that share their keys, as a multiple of the window: more of them read fewer keys twice, and mask more."""


@dataclass(slots=True)
class EncoderContext:
    """What the attention function of one model needs to know of the step. One per model, on one thread."""

    windows: dict[torch.nn.Module, int] = field(default_factory=dict)
    """Attention module -> how far it sees in both directions; modules that see everything are not in it."""
    texts: tuple[tuple[int, int], ...] = ()
    """First token of each text that has a call of its own, and the place behind its last one."""
    alike: tuple[tuple[int, torch.Tensor], ...] = ()
    """How many texts of one length share a call, with the places of their tokens, int64[texts x length]."""

    def begin(self, lens: Sequence[int], device: torch.device | None = None) -> None:
        """Start a step of texts of `lens` tokens each."""
        by_length, alone, together = defaultdict[int, list[int]](list), list[tuple[int, int]](), list[torch.Tensor]()
        for length, end in zip(lens, accumulate(lens), strict=True):
            by_length[length].append(end - length)
        for length, starts in by_length.items():
            if len(starts) == 1 or length > SHORT:
                alone += [(start, start + length) for start in starts]
            else:
                together.append(torch.tensor(starts)[:, None] + torch.arange(length))
        self.texts, self.alike = tuple(alone), ()
        if together:
            # One transfer for all.
            places = torch.cat([each.flatten() for each in together]).to(device)
            parts = places.split([each.numel() for each in together])
            self.alike = tuple((len(each), part) for each, part in zip(together, parts, strict=True))


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
    for count, places in context.alike:
        _attend_alike(query, key, value, scaling, window, attended, count, places)
    for start, end in context.texts:
        parts = query[:, :, start:end], key[:, :, start:end], value[:, :, start:end]
        attend = _attend if window is None or end - start <= window else _attend_near
        attend(*parts, scaling, window or 0, attended[:, start:end].transpose(1, 2))
    return attended, None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int,
    out: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    gqa = query.shape[1] != key.shape[1]
    out.copy_(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa))


def _attend_alike(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    out: torch.Tensor,
    count: int,
    places: torch.Tensor,
) -> None:
    """Write what `count` texts of one length, whose tokens are at `places`, attend to into `out`, [1, T, H, Dv]."""
    parts = [each[0].index_select(1, places).unflatten(1, (count, -1)).transpose(0, 1) for each in (query, key, value)]
    length = parts[0].shape[2]
    mask = None if window is None or length <= window else _near(0, length, 0, length, window, query.device)
    found = torch.empty(count, length, *out.shape[2:], dtype=out.dtype, device=out.device)
    _attend(*parts, scaling, 0, found.transpose(1, 2), mask)
    out[0].index_copy_(0, places, found.flatten(0, 1))


def _near(first: int, behind: int, low: int, high: int, window: int, device: torch.device) -> torch.Tensor:
    """bool[queries, keys]: whether queries [first, behind) see keys [low, high), `window` before and behind at most."""
    queries = torch.arange(first, behind, device=device)[:, None]
    return (queries - torch.arange(low, high, device=device)).abs() <= window


def _attend_near(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int, out: torch.Tensor
) -> None:
    """`_attend`, where each token sees those at most `window` before and behind it: block by block of the queries."""
    length, size = query.shape[2], BLOCKS * window
    for first in range(0, length, size):
        behind = min(first + size, length)
        low, high = max(0, first - window), min(length, behind + window)
        near = _near(first, behind, low, high, window, query.device)
        parts = query[:, :, first:behind], key[:, :, low:high], value[:, :, low:high]
        _attend(*parts, scaling, window, out[:, :, first:behind], near)


AttentionInterface.register(IMPLEMENTATION, encoder_attention)
