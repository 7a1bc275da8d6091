"""Attention of an encoder over the packed tokens of many texts: each text sees itself, and there is no padding.

transformers calls the registered function with the attention module first; `bind_context` has put the model's own
`EncoderContext` on it. No mask function is registered under the same name, so that transformers builds no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AttentionInterface

from core.models.hf.packed_attention import CONTEXT
from core.models.hf.products import Attend

IMPLEMENTATION: Final = "slipstream-encoder"
"""Name under which transformers finds `encoder_attention`."""
BLOCKS: Final = 4
"""Queries that share their keys, as a multiple of the window: more of them read fewer keys twice, and mask more."""

Text = tuple[int, int]
"""Its first token, and the place behind its last one."""


@dataclass(slots=True)
class ByDistance:
    """What every head's scores get for the distance of two tokens, whatever the tokens are. For one step."""

    table: torch.Tensor
    """float32[H, 2N - 1]: from a key N - 1 places before its query to one as many behind it."""
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    """Length of a text -> `of` it, for all layers."""

    def of(self, length: int) -> torch.Tensor:
        """[1, H, n, n] of a text of n = `length` tokens."""
        if length not in self.made:
            middle = self.table.shape[1] // 2
            near = self.table[:, None, middle + 1 - length : middle + length]
            self.made[length] = slanted(near.expand(-1, length, -1))[None]
        return self.made[length]


@dataclass(slots=True)
class EncoderContext:
    """What the attention function of one model needs to know of the step. One per model, on one thread."""

    windows: dict[torch.nn.Module, int] = field(default_factory=dict)
    """Attention module -> how far it sees in both directions; modules that see everything are not in it."""
    texts: tuple[Text, ...] = ()
    """Those of the step."""
    attend: Attend | None = None
    """What computes that of texts that are seen whole; None: torch does."""
    only_torch: bool = False
    """Whether some attention of the model is torch's for every text: scores with a bias that texts make, values of
    another width."""

    def begin(self, lens: Sequence[int]) -> None:
        """Start a step of texts of `lens` tokens each."""
        places = [0]
        for length in lens:
            places.append(places[-1] + length)
        self.texts = tuple(pairwise(places))

    def longest_by_torch(self, lens: Sequence[int]) -> int:
        """Tokens of the longest of texts of `lens` that torch attends to; 0 where there is none."""
        seen = 0 if self.attend is None or self.only_torch else min(self.windows.values(), default=max(lens, default=0))
        return max((length for length in lens if length > seen), default=0)


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
    return attend_within(context, query, key, value, scaling=scaling, window=context.windows.get(module)), None


def attend_within(
    context: EncoderContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None = None,
    window: int | None = None,
    bias_of: Callable[[int, int], torch.Tensor] | None = None,
    distances: ByDistance | None = None,
) -> torch.Tensor:
    """[1, T, H, Dv]: every text of the step attends to itself; query [1, H, T, D], key and value [1, Hkv, T, D or Dv].

    `bias_of`: [1, H, n, n] that is added to the scores of the n tokens between two places; `distances`: the same for
    all texts. Neither goes with a `window`.
    """
    attended = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    texts: Sequence[Text] = context.texts
    if bias_of is not None or key.shape != value.shape:
        context.only_torch = True
    elif context.attend is not None:
        whole, texts = _divided(texts, window)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        context.attend(query, key, value, whole, scale, attended, None if distances is None else distances.table)
    for start, end in texts:
        parts = query[:, :, start:end], key[:, :, start:end], value[:, :, start:end]
        out = attended[:, start:end].transpose(1, 2)
        bias = bias_of(start, end) if bias_of is not None else None
        if distances is not None:
            bias = distances.of(end - start).to(query.dtype)
        if window is None or end - start <= window:
            _attend(*parts, scaling, out, bias)
        else:
            _attend_near(*parts, scaling, window, out)
    return attended


def _divided(texts: Sequence[Text], window: int | None) -> tuple[Sequence[Text], Sequence[Text]]:
    """Those that a token with `window` sees whole, and the others."""
    if window is None:
        return texts, ()
    whole = [(start, end) for start, end in texts if end - start <= window]
    return whole, [(start, end) for start, end in texts if end - start > window]


def slanted(made: torch.Tensor) -> torch.Tensor:
    """[heads, n, n] of `made`, [heads, n, 2n - 1]: of row i its places n - 1 - i to 2n - 2 - i. A view."""
    made = made.contiguous()
    heads, length, width = made.shape
    return made.as_strided((heads, length, length), (length * width, width - 1, 1), length - 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    out: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    gqa = query.shape[1] != key.shape[1]
    out.copy_(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa))


def _attend_near(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int, out: torch.Tensor
) -> None:
    """`_attend`, where each token sees those at most `window` before and behind it: block by block of the queries."""
    length, size = query.shape[2], BLOCKS * window
    for first in range(0, length, size):
        behind = min(first + size, length)
        low, high = max(0, first - window), min(length, behind + window)
        queries = torch.arange(first, behind, device=query.device)[:, None]
        keys = torch.arange(low, high, device=query.device)[None]
        near = (queries - keys).abs() <= window
        parts = query[:, :, first:behind], key[:, :, low:high], value[:, :, low:high]
        _attend(*parts, scaling, out[:, :, first:behind], near)


AttentionInterface.register(IMPLEMENTATION, encoder_attention)
