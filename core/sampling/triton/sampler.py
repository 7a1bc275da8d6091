"""The sampler of CUDA devices: a fixed few launches for any mix of options, and no other [S, V] tensor than the logits.

Tokens are those of the plain sampler on an accelerator, bit for bit: weights, sums and cutoffs are the same numbers.
Two kinds of rows differ. A NaN that a mask forbids fails its row here, as on the CPU. A row whose largest logit is
infinite over its temperature gets its greedy token here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.batch.grammar_batch import TokenMask
from core.batch.sampling_batch import SamplingBatch
from core.sampling.penalties import TokenHistory
from core.sampling.sampler import SampleOutput, Sampler, Scored
from core.sampling.triton.options import Options, Whole
from core.sampling.triton.raw import normalise
from core.sampling.triton.rows import sample_rows

_NOTHING = (None,) * 9
"""Options of greedy rows without any."""


class TritonSampler(Sampler):
    """One launch for what is told of the model's own distribution, and one for all that leads to the tokens.

    Everything that changes logits happens in the second launch, after all memory that it needs was allocated: so they
    are changed as a whole or not at all, and nothing but `raw` needs to be noted in `Scored`.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._made: tuple[SamplingBatch, Options] | None = None
        """What `carried` made last: the step asks for it again, as the very objects that it has sent."""

    def warm(self) -> None:
        """Launch both kernels: there is one of each for all options, and another where rows do not begin at 16 bytes.

        Such rows come where a step is sampled in pieces, and only if the vocabulary is no multiple of four.
        """
        logits = torch.zeros(2, self.vocab_size, device=self.device)
        for rows in (logits, logits[1:]):
            count = len(rows)
            lens = torch.zeros(count, dtype=torch.int64, device=self.device)
            raw, tokens = rows.new_empty(count, 2), torch.empty_like(lens)
            normalise(rows, lens, raw, rows.new_empty(count, 0, dtype=torch.int64), rows.new_empty(count, 0))
            outputs = (tokens, rows.new_empty(count, dtype=torch.bool), rows.new_empty(count))
            sample_rows(rows, lens, lens.double(), *_NOTHING, raw, *outputs, random=False)

    def carried(self, batch: SamplingBatch) -> Sequence[np.ndarray]:
        """See `Sampler`."""
        wanted = (batch.alternatives, batch.chosen) if batch.logprobs else ()
        asked = [each for each in wanted if each is not None]
        if _is_plain(batch) and not len(batch.constrained):
            return asked
        options = Options.of(batch, batch.constrained, self.vocab_size)
        self._made = batch, options
        return [*asked, *options.arrays]

    def score_on(self, scored: Scored, batch: SamplingBatch, history: TokenHistory | None = None) -> None:
        """Keep what is told of the model's own distribution, of rows that want it. The rest of scoring is in `pick`."""
        logits = scored.logits
        assert logits.shape == (len(batch), self.vocab_size), (logits.shape, len(batch), self.vocab_size)
        assert logits.dtype == torch.float32 and logits.is_contiguous(), (logits.dtype, logits.stride())
        assert history is not None or not batch.any_penalty, "penalties need the token history"
        scored.history = history
        if not batch.logprobs or scored.raw is not None or not len(batch):
            return
        wanted = batch.alternatives
        if wanted is None:
            wanted = np.full(len(batch), batch.top_logprobs)
        width = min(batch.top_logprobs, self.vocab_size)
        raw = logits.new_empty(len(batch), 2)
        top_ids = logits.new_empty(len(batch), width, dtype=torch.int64)
        top_values = logits.new_empty(len(batch), width)
        staging = scored.staging or self._staging
        (asked,) = staging.upload([wanted])
        normalise(logits, asked, raw, top_ids, top_values)
        if batch.chosen is not None:
            found = logits.gather(1, *staging.upload([batch.chosen]))
            # As the kernel makes them of its alternatives: one subtraction after the other.
            scored.chosen = found.sub_(raw[:, :1]).sub_(raw[:, 1:])
        # Last, since it says that all of this is done.
        scored.raw = raw
        if width:
            scored.top_ids, scored.top_values = top_ids, top_values

    def pick(self, scored: Scored, batch: SamplingBatch, mask: TokenMask | None = None) -> SampleOutput:
        """Draw the tokens of scored rows, which must be from the `mask` where a row has one."""
        logits, count = scored.logits, len(batch)
        tokens = logits.new_empty(count, dtype=torch.int64)
        non_finite = logits.new_empty(count, dtype=torch.bool)
        logprobs = None if scored.raw is None else logits.new_empty(count)
        if count:
            self._launch(scored, batch, mask, tokens, non_finite, logprobs)
        return SampleOutput(tokens, non_finite, logprobs, scored.top_ids, scored.top_values, scored.chosen)

    def _launch(
        self,
        scored: Scored,
        batch: SamplingBatch,
        mask: TokenMask | None,
        tokens: torch.Tensor,
        non_finite: torch.Tensor,
        logprobs: torch.Tensor | None,
    ) -> None:
        places, logits, outputs = scored.places, scored.logits, (tokens, non_finite, logprobs)
        if mask is not None and not len(mask.places):
            mask = None
        if mask is None and _is_plain(batch):
            sample_rows(logits, places.lens, places.uniforms, *_NOTHING, scored.raw, *outputs, random=False)
            return
        options = self._options(batch, mask)
        # Masks come late, and alone: what a row may say depends on the token before (law 14).
        words = [] if mask is None else [np.ascontiguousarray(mask.words)]
        arrived = (scored.staging or self._staging).upload([*options.arrays, *words])
        floats, whole, top_ps, entries, values = arrived[: len(options.arrays)]
        biased = len(options.values) > 0
        biases = (entries, values, torch.empty_like(values)) if biased else (None, None, None)
        penalties = self._penalties(scored, batch, options) if options.penalised else (None, None)
        masks = arrived[-1] if words else None
        arguments = (floats, whole, top_ps, *biases, *penalties, masks, scored.raw, *outputs)
        sample_rows(logits, places.lens, places.uniforms, *arguments, random=not batch.all_greedy)

    def _options(self, batch: SamplingBatch, mask: TokenMask | None) -> Options:
        masked = batch.constrained if mask is None else mask.places
        if self._made is not None and self._made[0] is batch and np.array_equal(masked, batch.constrained):
            return self._made[1]
        return Options.of(batch, masked, self.vocab_size)

    @staticmethod
    def _penalties(scored: Scored, batch: SamplingBatch, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        """The token history, and int32[P, 3, longest] for what its rows' penalties note."""
        history = scored.history
        assert history is not None, "penalties need the token history"
        rows = np.flatnonzero(options.whole[Whole.SLOT] >= 0)
        longest = int(batch.upper_lens[rows].max())
        assert longest <= history.max_len, (longest, history.max_len)
        if history.recorder is not None:
            history.recorder.read("token_history", batch.rows[rows])
        shape = (options.penalised, 3, longest)
        return history.buffer, scored.logits.new_empty(shape, dtype=torch.int32)


def _is_plain(batch: SamplingBatch) -> bool:
    """Whether all rows take their largest logit as the model gave it."""
    return batch.all_greedy and not (len(batch.bias_rows) or batch.any_penalty)
