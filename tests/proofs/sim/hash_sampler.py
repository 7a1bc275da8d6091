"""Sampling of the fake device: reads all that a real sampler reads of `SamplingBatch`, and hashes it into the token.

A row that meets another row's options, random number, history or bias gets another token. What a greedy row does not
look at (its filters, the random number of a step that somebody else samples in) must not change it either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from core.batch.result import LogprobResult
from core.batch.sampling_batch import SamplingBatch
from core.sampling.places import Places
from tests.proofs.sim.reference import NOTHING, Extras, force, pick

FORCED = 1e8
"""A bias beyond any that a client may give: one of those tokens is said, whatever else is asked."""

History = Callable[[int, int], tuple[int, ...]]
"""(row, length) -> the first `length` tokens of the row's history on the device."""


def sample(states: list[int], batch: SamplingBatch, places: Places, history: History) -> list[int]:
    """One token per row of `batch`, which is at `places`; `states[i]` is what the last KV slot of row i holds."""
    if batch.all_greedy and not batch.any_penalty and not len(batch.bias_rows):
        return [pick(state, (), NOTHING) for state in states]
    lens, uniforms = places.lens.tolist(), places.uniforms.tolist()
    biases, forbidden = _biases(batch, lens)
    tokens = []
    for i, state in enumerate(states):
        forced = [token for token, value in biases[i] if value >= FORCED]
        read = partial(history, int(batch.rows[i]), lens[i])
        extras = () if forced else _extras(batch, i, uniforms, read, biases[i])
        tokens.append(force(state, forced) if forced else pick(state, extras, forbidden[i]))
    return tokens


def logprobs(tokens: list[int], batch: SamplingBatch) -> LogprobResult | None:
    """Made-up values from which the token can be told again, so that a value of another row or step shows."""
    if not batch.logprobs:
        return None
    chosen = np.asarray(tokens, np.int64)
    ranks = np.arange(batch.top_logprobs)
    return LogprobResult(
        chosen.astype(np.float32), chosen[:, None] + ranks, (chosen[:, None] - ranks).astype(np.float32)
    )


def _biases(batch: SamplingBatch, lens: list[int]) -> tuple[list[list[tuple[int, float]]], list[set[int]]]:
    biases: list[list[tuple[int, float]]] = [[] for _ in range(len(batch))]
    forbidden: list[set[int]] = [set() for _ in range(len(batch))]
    columns = (batch.bias_rows, batch.bias_tokens, batch.bias_values, batch.bias_from, batch.bias_until)
    for place, token, value, first, end in zip(*(column.tolist() for column in columns), strict=True):
        if not first <= lens[place] < end:
            continue
        if value == -math.inf:
            forbidden[place].add(token)
        else:
            biases[place].append((token, value))
    return biases, forbidden


def _extras(
    batch: SamplingBatch,
    i: int,
    uniforms: list[float],
    history: Callable[[], tuple[int, ...]],
    biases: list[tuple[int, float]],
) -> Extras:
    found: list[float | int | tuple[float | int, ...]] = []
    if batch.temperatures[i] > 0:
        found += [uniforms[i], float(batch.temperatures[i]), int(batch.top_ks[i])]
        found += [float(batch.top_ps[i]), float(batch.min_ps[i])]
    penalties = (
        float(batch.repetition_penalties[i]),
        float(batch.frequency_penalties[i]),
        float(batch.presence_penalties[i]),
    )
    if penalties != (1.0, 0.0, 0.0):
        found += [history(), *penalties]
    if biases:
        found.append(tuple(part for item in sorted(biases) for part in item))
    return tuple(found)
