"""How likely prompt tokens were: their log probabilities, and the likeliest tokens at their places."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from core.batch.scoring_batch import ScoringBatch
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory
from core.device.staging import Staging
from core.sampling.logprobs import leading_ids, pick_logprobs, raw_logprobs
from core.types.arrays import Ints

AT_ONCE = 32
"""Tokens whose distributions are made at a time: ranked alternatives take three times the bytes of the logits."""


class Scores(NamedTuple):
    """Of P prompt tokens, on the device or on the host."""

    values: torch.Tensor
    """float32[P]."""
    top_ids: torch.Tensor
    """int64[P, K], best first."""
    top_values: torch.Tensor
    """float32[P, K]."""


def score(
    logits: torch.Tensor, batch: ScoringBatch, sampled: Ints, staging: Staging
) -> tuple[torch.Tensor, Scores | None]:
    """(logits of the rows that sample, float32[S, V]; scores), from `logits`, float32[S + P, V], at `batch.beside`.

    `sampled`, int64[S]: places of those rows. No scores for lack of memory: the requests that want them end then.
    """
    wanted = batch.beside(sampled)
    arrays = [np.searchsorted(wanted, sampled), np.searchsorted(wanted, batch.places), batch.targets]
    rows, places, targets = staging.upload(arrays)
    own = logits.index_select(0, rows)
    try:
        return own, _scored(logits, places, targets, batch.top)
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        return own, None


def _scored(logits: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, top: int) -> Scores:
    parts = []
    for some, ids in zip(places.split(AT_ONCE), targets.split(AT_ONCE), strict=True):
        raw = raw_logprobs(logits.index_select(0, some))
        found = pick_logprobs(raw, ids, leading_ids(raw, top) if top else None)
        none = raw.new_empty(len(ids), 0)
        ranked = none.long() if found.top_ids is None else found.top_ids
        parts.append(Scores(found.values, ranked, none if found.top_values is None else found.top_values))
    return Scores(*map(torch.cat, zip(*parts, strict=True)))
