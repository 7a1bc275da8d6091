"""What transformers makes of a few texts by an encoder, one text at a time: what all else is compared with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

LENGTHS: Final = (9, 5, 14, 9)
"""Tokens of the texts."""


@dataclass(frozen=True, slots=True)
class EncoderReference:
    """Texts, int64[n] each, the types of their tokens, and what becomes of each alone."""

    ids: tuple[torch.Tensor, ...]
    types: tuple[torch.Tensor, ...]
    token_types: int
    """How many types of tokens the model tells apart."""
    states: tuple[torch.Tensor, ...]
    """float32[n, H] each."""
    labels: tuple[torch.Tensor, ...] = ()
    """float32[L] each; none for a model without a head."""
    multiplied: int = 0
    """Elements of the matrices that a token is multiplied by; those of layers that share them count for each."""


@torch.inference_mode()
def plain_run(whole: PreTrainedModel, vocab_size: int, *, labels: bool) -> EncoderReference:
    """Run `whole` and its base model over texts from all over the vocabulary; each has tokens of all types.

    `labels`: whether there is a head that judges.
    """
    base: Any = whole.base_model
    config, device = base.config.get_text_config(), base.device
    takes_types = "token_type_ids" in inspect.signature(base.forward).parameters
    types = getattr(config, "type_vocab_size", None) if takes_types else None
    token_types = types if isinstance(types, int) and types > 1 else 1
    pad = getattr(config, "pad_token_id", None)
    generator = torch.Generator().manual_seed(0)
    # Some count positions by the tokens that are not padding.
    allowed = torch.tensor([token for token in range(vocab_size) if token != pad])
    ids = tuple(allowed[torch.randint(len(allowed), (n,), generator=generator)].to(device) for n in LENGTHS)
    kinds = tuple(torch.arange(len(row), device=device) * token_types // len(row) for row in ids)
    named = [{"token_type_ids": each[None]} if token_types > 1 else {} for each in kinds]
    asked: list[dict[str, Any]] = [{"input_ids": row[None], **more} for row, more in zip(ids, named, strict=True)]
    with counted_in(base) as counted:
        states = [base(**asked[0]).last_hidden_state[0].float()]
    states += [base(**each).last_hidden_state[0].float() for each in asked[1:]]
    judged = [whole(**each).logits[0].float() for each in asked] if labels else []
    return EncoderReference(ids, kinds, token_types, tuple(states), tuple(judged), sum(counted))


@contextmanager
def counted_in(base: nn.Module) -> Iterator[list[int]]:
    """Elements of each matrix that all tokens of a run are multiplied by, in a list that fills while it runs."""
    counted = list[int]()

    def look(module: Any, given: tuple[Any, ...], _: Any) -> None:
        rows = given[0] if given else None
        if isinstance(rows, torch.Tensor) and rows.shape[-2:] == (LENGTHS[0], module.weight.shape[1]):
            counted.append(module.weight.numel())

    hooks = [each.register_forward_hook(look) for each in base.modules() if _has_matrix(each)]
    try:
        yield counted
    finally:
        for hook in hooks:
            hook.remove()


def _has_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() == 2
