"""The classification head of an encoder: whatever the class of transformers puts behind the model's hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

TRIED_TOKENS: Final = 6


class EncoderHead:
    """A `core.models.base.LabelHead` that runs the class's own `forward` over hidden states that are there already.

    Heads that read the first token alone, which is tried when this is made, judge all texts of a step at once.
    """

    def __init__(self, whole: PreTrainedModel) -> None:
        """`whole`: the encoder with its head, as the checkpoint has them."""
        self._whole = whole
        self._base: Any = whole.base_model
        self._pad = getattr(whole.config.get_text_config(), "pad_token_id", None)
        self._count = int(whole.config.num_labels or 0)
        self._first_only = self._reads_the_first_only()

    @property
    def count(self) -> int:
        """How many labels there are."""
        return self._count

    @torch.inference_mode()
    def label(self, hidden: torch.Tensor, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
        """float32[E, L]: what the head makes of tokens `start:end` of `hidden`, [T, H], for each of E texts."""
        if self._first_only:
            return self._judged(torch.stack([hidden[start] for start in starts])[:, None])
        return torch.cat([self._judged(hidden[None, start:end]) for start, end in zip(starts, ends, strict=True)])

    def _judged(self, states: torch.Tensor) -> torch.Tensor:
        """float32[E, L] of `states`, [E, n, H]."""
        # Some heads look for the last token that is no padding.
        ids = torch.full(states.shape[:2], 1 if self._pad == 0 else 0, device=states.device)
        with self._given(states):
            found: torch.Tensor = self._whole(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()
        assert found.shape == (len(states), self._count), found.shape
        return found

    @contextmanager
    def _given(self, states: torch.Tensor) -> Iterator[None]:
        """Have the model below answer with `states`, and with what its own pooler makes of them."""
        answer = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=states, pooler_output=self._pooled(states)
        )
        self._base.forward = lambda *_, **__: answer
        try:
            yield
        finally:
            del self._base.forward

    def _pooled(self, states: torch.Tensor) -> torch.Tensor | None:
        pooler = getattr(self._base, "pooler", None)
        if isinstance(pooler, torch.nn.Linear):  # ALBERT's
            return torch.tanh(pooler(states[:, 0]))
        return None if pooler is None else pooler(states)

    def _reads_the_first_only(self) -> bool:
        generator, width = torch.Generator().manual_seed(0), self._whole.config.hidden_size
        weight = next(self._whole.parameters())
        drawn = torch.randn(2, TRIED_TOKENS, width, generator=generator).to(weight.device, weight.dtype)
        drawn[1, 0] = drawn[0, 0]
        with torch.inference_mode():
            apart = torch.cat([self._judged(drawn[:1]), self._judged(drawn[1:]), self._judged(drawn[:1, :1])])
        return bool(torch.allclose(apart[0], apart[1], rtol=1e-3, atol=1e-5)) and bool(
            torch.allclose(apart[0], apart[2], rtol=1e-3, atol=1e-5)
        )
