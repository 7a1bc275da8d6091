"""Applies token masks to logits."""

from __future__ import annotations

import numpy as np
import torch

from core.batch.grammar_batch import TokenMask
from core.device.staging import Staging
from core.types.grammar import Words


def apply_mask(logits: torch.Tensor, mask: TokenMask, staging: Staging) -> None:
    """-inf for every token that is not allowed, in place on float32[S, V]; other rows are not touched."""
    if len(mask.places) == 0:
        return
    vocab = logits.shape[1]
    if logits.device.type == "cpu":
        banned = torch.from_numpy(_banned(mask.words, vocab))
    else:
        banned = _banned_on(mask.words, vocab, staging)
    if len(mask.places) == len(logits):
        logits.masked_fill_(banned, -torch.inf)
        return
    (index,) = staging.upload([mask.places])
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(banned, -torch.inf))


def _banned(words: Words, vocab: int) -> np.ndarray:
    """bool[G, V]."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab, bitorder="little")
    banned: np.ndarray = bits == 0
    return banned


def _banned_on(words: Words, vocab: int, staging: Staging) -> torch.Tensor:
    """bool[G, V] on the device; the bits travel, an eighth of a byte per token."""
    (packed,) = staging.upload([np.ascontiguousarray(words).view(np.int64).reshape(-1)])
    shifts = torch.arange(64, device=packed.device)
    bits = (packed.view(len(words), -1, 1) >> shifts) & 1
    return bits.view(len(words), -1)[:, :vocab] == 0
