"""Sampling batches built from per-row options, and a plain one-row-at-a-time sampler to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from core.batch.sampling_batch import SamplingBatch
from core.device.staging import Staging
from core.sampling.penalties import TokenHistory
from core.sampling.places import Places
from core.sampling.sampler import SampleOutput, Sampler

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """Everything about one row that its token may depend on."""

    logits: torch.Tensor
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = field(default=())

    def penalised(self) -> bool:
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0


def batch_of(
    rows: list[Row], *, logprobs: bool = False, top_logprobs: int = 0, chosen: np.ndarray | None = None
) -> SamplingBatch:
    """The SamplingBatch of rows that sit in pool rows 1, 2, …"""

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], dtype)

    lens = np.array([len(row.prompt) + len(row.output) for row in rows], np.int64)
    bias = [(i, token, value) for i, row in enumerate(rows) for token, value in row.bias]
    return SamplingBatch(
        rows=np.arange(1, len(rows) + 1, dtype=np.int64),
        temperatures=column("temperature", np.float32),
        top_ks=column("top_k", np.int64),
        top_ps=column("top_p", np.float32),
        min_ps=column("min_p", np.float32),
        uniforms=column("uniform", np.float64)[:, None],
        repetition_penalties=column("repetition", np.float32),
        frequency_penalties=column("frequency", np.float32),
        presence_penalties=column("presence", np.float32),
        prompt_lens=np.array([len(row.prompt) for row in rows], np.int64),
        lower_lens=lens,
        upper_lens=lens,
        bias_rows=np.array([entry[0] for entry in bias], np.int64),
        bias_tokens=np.array([entry[1] for entry in bias], np.int64),
        bias_values=np.array([entry[2] for entry in bias], np.float32),
        bias_from=np.zeros(len(bias), np.int64),
        bias_until=np.full(len(bias), 2**40),
        all_greedy=all(row.temperature == 0 for row in rows),
        any_top_k=any(row.top_k > 0 for row in rows),
        any_top_p=any(row.top_p < 1 for row in rows),
        any_min_p=any(row.min_p > 0 for row in rows),
        any_penalty=any(row.penalised() for row in rows),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        chosen=chosen,
    )


def places_of(rows: list[Row]) -> Places:
    """Where the rows stand, with the uniforms that the test has chosen."""
    batch = batch_of(rows)
    return Places.of(batch, torch.from_numpy(batch.lower_lens), Staging(CPU))


def history_of(rows: list[Row], max_len: int = 0, rng: np.random.Generator | None = None) -> TokenHistory:
    """A seeded history whose unused columns hold leftovers of other requests."""
    longest = max([max_len, *(len(row.prompt) + len(row.output) for row in rows)])
    vocab = rows[0].logits.numel()
    leftovers = (rng or np.random.default_rng(0)).integers(0, vocab, (len(rows) + 1, longest))
    history = TokenHistory(torch.from_numpy(leftovers).to(torch.int32))
    ids = [np.array(row.prompt + row.output, np.int64) for row in rows]
    history.seed(list(range(1, len(rows) + 1)), ids)
    return history


def sample(rows: list[Row], **told: Any) -> SampleOutput:
    """Run the sampler over fresh copies of the rows' logits; `told`: see `batch_of`."""
    logits = torch.stack([row.logits for row in rows])
    batch = batch_of(rows, **told)
    return Sampler(logits.shape[1], CPU).sample(logits, batch, places_of(rows), history_of(rows))


def token_of(row: Row, uniform: float | None = None) -> int:
    """The token of a row alone."""
    return int(sample([row if uniform is None else replace(row, uniform=uniform)]).tokens[0])
