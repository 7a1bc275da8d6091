"""From logits to tokens: bias, penalties, temperature, top-k, top-p, min-p, one draw.

Each row's token is a function of its own logits, options and uniform alone (law 13): sums are exact (`draw`), kept sets
are thresholds on the value (`cutoff`), and everything else works element by element. Which kernels run is decided from
host arrays, so on an accelerator nothing here waits for the device. CUDA devices with Triton have a sampler of their
own (`core.sampling.triton`), whose tokens are those of this one's way on accelerators.

On one CPU core with 64 rows of 32,000 logits, a draw at temperature 0.8 costs an eighth of softmax and `multinomial`,
as one uniform per row replaces a random number per logit; with top-k 50 a sixth; with top-k 50 and top-p 0.9 a tenth of
the usual way with a sort. A greedy batch pays for one `max` with its index, which is twice as fast as `argmax`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from core.batch.grammar_batch import TokenMask
from core.batch.sampling_batch import SamplingBatch
from core.device.staging import Staging
from core.sampling.candidates import draw_rows
from core.sampling.cutoff import DeviceFilters, Filters, SampledRows, dropped
from core.sampling.draw import draw, padded, weigh
from core.sampling.grammar.mask import apply_mask
from core.sampling.logprobs import leading_ids, pick_logprobs, raw_logprobs
from core.sampling.penalties import TokenHistory, apply_bias, apply_penalties
from core.sampling.places import Places
from core.types.arrays import Ints

MIN_TEMPERATURE = 1e-6
"""Smaller temperatures act as this one, which is greedy except for exact ties: the quotients must stay finite."""

CACHED_LOGITS = 1 << 19
"""Logits that the CPU works on at a time: 2 MiB of float32."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What S rows sampled, on the sampler's device."""

    tokens: torch.Tensor
    """int64[S]; 0 where `non_finite`."""
    non_finite: torch.Tensor
    """bool[S]: the row held NaN or +inf, or nothing above -inf, so its token means nothing."""
    logprobs: torch.Tensor | None
    """float32[S] of the raw logits, None unless some row wants them; meaningless where `non_finite`."""
    top_ids: torch.Tensor | None
    """int64[S, K], None unless some row wants alternatives. K = min(batch.top_logprobs, V)."""
    top_values: torch.Tensor | None
    """float32[S, K], falling."""
    chosen: torch.Tensor | None = None
    """float32[S, C]: log probabilities of `SamplingBatch.chosen`, None unless some row wants them."""


@dataclass(slots=True)
class Scored:
    """S rows being turned into tokens, on the sampler's device, and which steps of that are done.

    Logits are changed in place, and memory may run out between two changes. Each change happens as a whole or not at
    all, because an allocator raises before its kernel is launched. It is noted here, so that none is done twice.
    """

    logits: torch.Tensor
    """float32[S, V]; of the model, then with bias, penalties, mask and temperature."""
    places: Places
    staging: Staging | None = None
    """What has some of the arrays of `Sampler.carried` on the device already; None if nothing was sent before."""
    raw: torch.Tensor | None = None
    """float32[S, V]: log probabilities of the model itself, None unless some row wants them. What is kept of them is
    the sampler's affair; `TritonSampler` keeps two numbers a row."""
    top_ids: torch.Tensor | None = None
    """int64[S, K]: the model's most likely tokens, None unless some row wants them."""
    top_values: torch.Tensor | None = None
    """float32[S, K]: their log probabilities, where a sampler has no `raw` to pick them from."""
    chosen: torch.Tensor | None = None
    """float32[S, C]: log probabilities of chosen ids, None unless some row wants them."""
    history: TokenHistory | None = None
    """Where penalties are counted from, for a sampler that applies them last."""
    is_biased: bool = False
    is_penalised: bool = False
    tops: torch.Tensor | None = None
    """float32[S]: row maxima, once the mask is applied."""
    greedy: torch.Tensor | None = None
    """int64[S]: the token ids of `tops`."""
    divided: int = 0
    """Leading rows whose logits were divided by their temperatures."""

    def part(self, places: slice) -> Scored:
        """Some of the rows; tensors are views."""
        names = ("raw", "top_ids", "top_values", "chosen", "tops", "greedy")
        tensors = ((name, getattr(self, name)) for name in names)
        parts: dict[str, Any] = {name: None if tensor is None else tensor[places] for name, tensor in tensors}
        divided = min(max(self.divided, places.start), places.stop) - places.start
        return replace(self, logits=self.logits[places], places=self.places.part(places), divided=divided, **parts)


class Sampler:
    """Samples one token per row. Holds no state of any request; called on the forward stream."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        assert vocab_size > 0, vocab_size
        self.vocab_size = vocab_size
        self.device = device
        self._staging = Staging(device)

    def warm(self) -> None:
        """Compile what a step would otherwise wait for; nothing here. May raise what an allocator raises."""

    def carried(self, batch: SamplingBatch) -> Sequence[np.ndarray]:
        """Host arrays that sampling `batch` without a mask uploads, those very objects; none here.

        The step may send them with its inputs: `Scored.staging` finds them then.
        """
        return ()

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        places: Places,
        history: TokenHistory | None = None,
        mask: TokenMask | None = None,
    ) -> SampleOutput:
        """Draw the next token of each of the S rows of `batch`, which are at `places`: `score`, then `pick`.

        `logits`: contiguous float32[S, V], modified in place. `history`: needed when the batch has penalties.
        """
        return self.pick(self.score(logits, batch, places, history), batch, mask)

    def score(
        self, logits: torch.Tensor, batch: SamplingBatch, places: Places, history: TokenHistory | None = None
    ) -> Scored:
        """Do everything that needs no mask, so that a constrained step launches it before it waits for its mask.

        `logits`: contiguous float32[S, V], modified in place. `history` must be given when the batch has penalties, and
        must hold the tokens before its place of each penalised row; the caller appends the new tokens.
        """
        scored = Scored(logits, places)
        self.score_on(scored, batch, history)
        return scored

    def score_on(self, scored: Scored, batch: SamplingBatch, history: TokenHistory | None = None) -> None:
        """As `score`, but skips the changes that `scored` notes as done. Call it again after a lack of memory."""
        logits = scored.logits
        assert logits.shape == (len(batch), self.vocab_size), (logits.shape, len(batch), self.vocab_size)
        assert logits.dtype == torch.float32 and logits.is_contiguous(), (logits.dtype, logits.stride())
        # First, from the logits as the model gave them: bias and penalties below change them in place.
        if batch.logprobs:
            if scored.raw is None:
                scored.raw = raw_logprobs(logits)
            if batch.top_logprobs and scored.top_ids is None:
                scored.top_ids = leading_ids(scored.raw, batch.top_logprobs)
            if batch.chosen is not None and scored.chosen is None:
                scored.chosen = scored.raw.gather(1, *self._staging.upload([batch.chosen]))
        if not scored.is_biased:
            apply_bias(logits, batch, scored.places.lens)
            scored.is_biased = True
        if batch.any_penalty and not scored.is_penalised:
            assert history is not None, "penalties need the token history"
            apply_penalties(logits, batch, scored.places.lens, history)
            scored.is_penalised = True

    def pick(self, scored: Scored, batch: SamplingBatch, mask: TokenMask | None = None) -> SampleOutput:
        """One token per row, among those that `mask` allows. Can be called again after a lack of memory."""
        if scored.tops is None or scored.greedy is None:
            # After bias and penalties, so that no bias brings back a token that the mask forbids.
            if mask is not None:
                apply_mask(scored.logits, mask, self._staging)
            scored.tops, scored.greedy = scored.logits.max(-1)
        tops, tokens = scored.tops, scored.greedy
        if not batch.all_greedy:
            tokens = self._draw_sampled(scored, tops, tokens, batch)
        non_finite = ~tops.isfinite()
        tokens = tokens.masked_fill(non_finite, 0)
        if scored.raw is None:
            return SampleOutput(tokens, non_finite, None, None, None)
        picked = pick_logprobs(scored.raw, tokens, scored.top_ids)
        return SampleOutput(tokens, non_finite, picked.values, picked.top_ids, picked.top_values, scored.chosen)

    def _draw_sampled(
        self, scored: Scored, tops: torch.Tensor, greedy: torch.Tensor, batch: SamplingBatch
    ) -> torch.Tensor:
        """int64[S]: `greedy` with the rows of positive temperature replaced by draws."""
        places = np.flatnonzero(batch.temperatures > 0)
        if len(places) == 0:
            return greedy
        if len(places) < len(batch):
            (index,) = self._staging.upload([places])
            # Copies, so that the divisions below do not change the caller's `scored`.
            scored = Scored(scored.logits.index_select(0, index), scored.places.take(index))
            tops = tops.index_select(0, index)
        # On the CPU a few rows at a time, so that a row stays in the cache from its division to its draw.
        step = max(1, CACHED_LOGITS // self.vocab_size) if self.device.type == "cpu" else len(places)
        parts = [
            self._draw(scored, i, tops[i : i + step], batch, places[i : i + step]) for i in range(0, len(places), step)
        ]
        drawn = torch.cat(parts) if len(parts) > 1 else parts[0]
        return drawn if len(places) == len(batch) else greedy.index_copy(0, index, drawn)

    def _draw(self, scored: Scored, start: int, tops: torch.Tensor, batch: SamplingBatch, places: Ints) -> torch.Tensor:
        """int64[n] tokens of the n rows from `start` on, which are `places` of the batch and sample at random."""
        warm = np.maximum(batch.temperatures[places], np.float32(MIN_TEMPERATURE))
        (temperatures,) = self._staging.upload([warm])
        uniforms = scored.places.uniforms[start : start + len(places)]
        logits, done = scored.logits[start : start + len(places)], scored.divided - start
        if done <= 0:
            logits.div_(temperatures[:, None])
        else:
            logits[done:].div_(temperatures[done:, None])
        scored.divided = max(scored.divided, start + len(places))
        scaled = padded(logits)
        tops = tops / temperatures
        weights = weigh(scaled, tops)
        if not (batch.any_top_k or batch.any_top_p or batch.any_min_p):
            return draw(weights, uniforms)
        filters = Filters.of(batch.top_ks[places], batch.top_ps[places], batch.min_ps[places], self.vocab_size)
        rows = SampledRows(scaled, weights, tops, uniforms, filters)
        return draw_rows(rows) if self.device.type == "cpu" else self._draw_by_bisection(rows)

    def _draw_by_bisection(self, rows: SampledRows) -> torch.Tensor:
        """Draw on an accelerator: a fixed sequence of kernels, whatever the values are."""
        active = np.flatnonzero(rows.filters.active)
        (index,) = self._staging.upload([active])
        some = rows.take(active, index)
        (top_ks,) = self._staging.upload([some.filters.top_ks])
        top_ps, floors = self._staging.upload([some.filters.top_ps, some.filters.floors])
        drops = dropped(some.scaled, some.weights, some.tops, DeviceFilters(top_ks, top_ps, floors))
        kept = rows.weights.index_copy(0, index, some.weights.masked_fill(drops, 0.0))
        return draw(kept, rows.uniforms)
