"""Sampling in compiled code, on the CPU, for the options that most rows have: greedy, temperature, top-k, top-p, min-p.

The tokens are those of `sampler`, for every row. Whole numbers decide there and here, and their sums are exact. The
shares that they are made of come from the same softmax of PyTorch: another one may differ in a last bit, and so, once
in millions of tokens, in the token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.batch.sampling_batch import SamplingBatch
from core.sampling.cutoff import Filters
from core.sampling.draw import BLOCK
from core.sampling.sampler import CACHED_LOGITS, MIN_TEMPERATURE, SampleOutput
from core.types.arrays import Ints


def takes(batch: SamplingBatch) -> bool:
    """Whether compiled code knows all options of the batch."""
    return not (batch.logprobs or batch.any_penalty or len(batch.bias_rows) or len(batch.constrained))


class CompiledSampler:
    """Does what `Sampler.sample` does, for batches that `takes` accepts. Holds no state of any request."""

    def __init__(self, module: Any, vocab_size: int) -> None:
        """`module`: see `core.native.host`."""
        self._module = module
        self._vocab_size = vocab_size
        self._padded = vocab_size + -vocab_size % BLOCK

    def greedy(self, logits: torch.Tensor) -> SampleOutput:
        """The greatest token of each row of `logits`, contiguous float32[S, V], the first of equal ones."""
        _, tokens, non_finite = self._peaks(logits)
        return SampleOutput(torch.from_numpy(tokens), torch.from_numpy(non_finite), None, None, None)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, lens: torch.Tensor) -> SampleOutput:
        """One token per row of `logits`, contiguous float32[S, V], which stay as they are.

        `lens`, int64[S]: tokens before each. May raise what an allocator raises; nothing was changed then.
        """
        assert len(logits) == len(batch), (logits.shape, len(batch))
        tops, tokens, non_finite = self._peaks(logits)
        sampled = np.flatnonzero(batch.temperatures > 0)
        uniforms = _uniforms(batch, lens.numpy())
        # As many rows at a time as the cache holds from their division to their draw.
        step = max(1, CACHED_LOGITS // self._vocab_size)
        for start in range(0, len(sampled), step):
            part = sampled[start : start + step]
            self._draw(logits, tops, batch, part, uniforms[part], non_finite, tokens)
        return SampleOutput(torch.from_numpy(tokens), torch.from_numpy(non_finite), None, None, None)

    def _peaks(self, logits: torch.Tensor) -> Any:
        """(greatest logit, its token, whether one of them is not finite) of each row: float32, int64, bool[S]."""
        assert logits.ndim == 2 and logits.shape[1] == self._vocab_size, (logits.shape, self._vocab_size)
        assert logits.dtype == torch.float32 and logits.is_contiguous(), (logits.dtype, logits.stride())
        return self._module.peaks(logits.data_ptr(), *logits.shape)

    def _draw(
        self,
        logits: torch.Tensor,
        tops: np.ndarray,
        batch: SamplingBatch,
        part: Ints,
        uniforms: np.ndarray,
        non_finite: np.ndarray,
        tokens: Ints,
    ) -> None:
        """Replace the tokens of the rows `part`, int64[n], by draws."""
        count, width = len(part), self._padded
        warm = np.maximum(batch.temperatures[part], np.float32(MIN_TEMPERATURE))
        scaled = torch.empty((count, width))
        self._module.scale(
            *(logits.data_ptr(), part.ctypes.data, warm.ctypes.data, scaled.data_ptr()),
            *(count, self._vocab_size, width),
        )
        shares = scaled.softmax(-1)
        filters = Filters.of(batch.top_ks[part], batch.top_ps[part], batch.min_ps[part], self._vocab_size)
        peaks = tops[part] / warm
        arrays: tuple[npt.NDArray[Any], ...] = (
            uniforms,
            filters.top_ks,
            filters.top_ps,
            filters.floors,
            peaks,
            part,
            non_finite,
            tokens,
        )
        for array, dtype in zip(arrays, DTYPES, strict=True):
            assert array.dtype == dtype and array.flags.c_contiguous, (array.dtype, dtype)
        addresses = (array.ctypes.data for array in arrays)
        self._module.draw(scaled.data_ptr(), shares.data_ptr(), count, width, *addresses)


def _uniforms(batch: SamplingBatch, lens: Ints) -> npt.NDArray[np.float64]:
    """float64[S]: the one random number of each place, as `Places.of` picks it (law 13)."""
    numbers = batch.uniforms
    if numbers.shape[1] == 1:
        return numbers[:, 0]
    picked: npt.NDArray[np.float64] = np.take_along_axis(numbers, (lens - batch.lower_lens)[:, None], 1)[:, 0]
    return picked


DTYPES = (np.float64, np.int64, np.float64, np.float32, np.float32, np.int64, np.bool_, np.int64)
"""Of what `draw` reads and writes by address, in its order."""
