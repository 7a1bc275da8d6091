"""Sampling options by row, so that the options of a whole step are a few array reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from core.batch.sampling_batch import SamplingBatch
from core.invariants import check
from core.sampling.uniform import origin, uniforms
from core.types.arrays import Bools, Floats, Ints
from core.types.request import Req

NO_INTS: Ints = np.empty(0, np.int64)
NO_FLOATS = np.empty(0, np.float32)

FORCE = np.float32(1e9)
"""Bias of a forced token: beyond any logit, and still finite after any temperature and penalty."""

STOP_BITS = 64
"""Bits of the word per row that sums up its stop ids."""

ALWAYS = 2**62
"""Beyond any length."""


@dataclass(frozen=True, slots=True)
class Biases:
    """What is added to logits of one request: `values[i]` to that of `tokens[i]`, at lengths [first[i], end[i]).

    float32[k] and int64[k] each.
    """

    tokens: Ints
    values: Floats
    first: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def between(self, lower: int, upper: int) -> Biases:
        """Those that count at some length in [lower, upper]."""
        return self.of((self.first <= upper) & (self.end > lower))

    def of(self, which: Bools) -> Biases:
        """Those at the places, bool[k], that are set."""
        if which.all():
            return self
        return Biases(self.tokens[which], self.values[which], self.first[which], self.end[which])


NO_BIASES = Biases(NO_INTS, NO_FLOATS, NO_INTS, NO_INTS)


@dataclass(frozen=True, slots=True)
class Steady:
    """The options of some rows, as far as the lengths of their sequences do not decide. No array is ever written."""

    key: bytes
    """The rows themselves, as bytes."""
    options: dict[str, Any]
    """Fields of `SamplingBatch`."""
    biased: bool
    """Whether some row has biases, at whatever lengths."""


class SamplingTable:
    """One column per option, indexed by row. `fill` at admission, `batch` at every step."""

    def __init__(self, num_rows: int, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.vocab_size = self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        floats = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
        self._floats = {name: np.zeros(num_rows, np.float32) for name in floats}
        self._top_k: Ints = np.zeros(num_rows, np.int64)
        self._origin: Ints = np.zeros(num_rows, np.int64)
        self._prompt_len: Ints = np.zeros(num_rows, np.int64)
        self._top_logprobs: Ints = np.zeros(num_rows, np.int64)
        self._logprobs = np.zeros(num_rows, np.bool_)
        self._penalised = np.zeros(num_rows, np.bool_)
        self._stop_bits = np.zeros(num_rows, np.uint64)
        """Bit b is set if some stop id is b modulo 64, so that most tokens need no comparison with the ids."""
        self._chosen: list[Ints] = [NO_INTS] * num_rows
        """By row: ids whose log probabilities are wanted."""
        self._constrained = np.zeros(num_rows, np.bool_)
        self._biases: list[Biases] = [NO_BIASES] * num_rows
        self._biased_until: Ints = np.zeros(num_rows, np.int64)
        """By row: the least length at which none of its biases counts any more, nor at any length from there but
        `_last`."""
        self._last: Ints = np.full(num_rows, -1, np.int64)
        """By row: the length at which its last output is forced; -1 for none."""
        self._steady: Steady | None = None
        """Of the rows of the step before; None after a change of the table."""

    def fill(self, req: Req) -> None:
        """Take over the options of `req`, which now owns `req.row`.

        Raises InvariantViolation if an id to be biased, blocked, forced or told of is not in the vocabulary.
        """
        self._steady = None
        row, params = req.row, req.params
        for name, column in self._floats.items():
            column[row] = getattr(params, name)
        self._top_k[row] = params.top_k
        self._origin[row] = origin(req.seed, req.prompt_len)
        self._prompt_len[row] = req.prompt_len
        self._logprobs[row] = params.logprobs
        self._top_logprobs[row] = params.top_logprobs
        self._chosen[row] = np.array(params.logprob_token_ids, np.int64) if params.logprob_token_ids else NO_INTS
        self._penalised[row] = params.penalised
        # Of a set: ids that share a bit count once.
        self._stop_bits[row] = sum({1 << token % STOP_BITS for token in params.stop_token_ids})
        self._constrained[row] = req.grammar is not None
        ends = sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)})
        # Each id may be written into the row's logits: one outside of them would end the process on CUDA.
        # And of one outside of them a log probability may be read.
        ids = (
            *params.logit_bias,
            *params.logprob_token_ids,
            *ends,
            *req.forced_first,
            *req.forced_last,
            *req.not_first,
        )
        inside = not ids or (min(ids) >= 0 and max(ids) < self._vocab_size)
        check("bias_in_logits", inside, row=row, vocab_size=self._vocab_size)
        last = self._last[row] = req.prompt_len + req.max_new_tokens - 1 if req.forced_last else -1
        biases = self._biases[row] = _biases(req, ends)
        self._biased_until[row] = biases.end[biases.first != last].max(initial=0) if len(biases) else 0

    def may_stop(self, rows: Ints, tokens: Ints) -> np.ndarray:
        """bool[n]: whether `tokens[i]` could be a stop id of `rows[i]`, int64[n] both. Never False for one that is."""
        bits = self._stop_bits[rows]
        if np.count_nonzero(bits) == 0:
            return np.zeros(len(rows), np.bool_)
        bits >>= (tokens % STOP_BITS).astype(np.uint64)
        found: np.ndarray = (bits & np.uint64(1)).astype(np.bool_)
        return found

    def batch(self, rows: Ints, lower: Ints, upper: Ints) -> SamplingBatch:
        """Options of `rows`, for tokens behind `lower` to `upper` others of their sequences; int64[S] each."""
        # Steady decode samples the same rows step after step: what lengths do not decide is the same then.
        key = rows.tobytes()
        if self._steady is None or self._steady.key != key:
            self._steady = self._steady_options(rows, key)
        options = self._steady.options
        biased = self._biases_between(rows, lower, upper) if self._steady.biased else (NO_INTS, NO_BIASES)
        bias_rows, biases = biased
        return SamplingBatch(
            rows=rows,
            uniforms=np.zeros((len(rows), 1)) if options["all_greedy"] else self._uniforms(rows, lower, upper),
            lower_lens=lower,
            upper_lens=upper,
            bias_rows=bias_rows,
            bias_tokens=biases.tokens,
            bias_values=biases.values,
            bias_from=biases.first,
            bias_until=biases.end,
            **options,
        )

    def _steady_options(self, rows: Ints, key: bytes) -> Steady:
        columns = {name: column[rows] for name, column in self._floats.items()}
        top_ks, logprobs = self._top_k[rows], self._logprobs[rows]
        random = columns["temperature"] > 0
        any_logprobs = bool(logprobs.any())
        options = {
            "temperatures": columns["temperature"],
            "top_ks": top_ks,
            "top_ps": columns["top_p"],
            "min_ps": columns["min_p"],
            "repetition_penalties": columns["repetition_penalty"],
            "frequency_penalties": columns["frequency_penalty"],
            "presence_penalties": columns["presence_penalty"],
            "prompt_lens": self._prompt_len[rows],
            "all_greedy": not random.any(),
            "any_top_k": bool((random & (top_ks > 0)).any()),
            "any_top_p": bool((random & (columns["top_p"] < 1)).any()),
            "any_min_p": bool((random & (columns["min_p"] > 0)).any()),
            "any_penalty": bool(self._penalised[rows].any()),
            "logprobs": any_logprobs,
            "top_logprobs": int(self._top_logprobs[rows].max(initial=0)),
            "constrained": np.flatnonzero(self._constrained[rows]),
            "alternatives": np.where(logprobs, self._top_logprobs[rows], -1) if any_logprobs else None,
            "chosen": self._chosen_of(rows) if any_logprobs else None,
        }
        biased = bool(((self._biased_until[rows] > 0) | (self._last[rows] >= 0)).any())
        return Steady(key, options, biased)

    def _chosen_of(self, rows: Ints) -> Ints | None:
        """int64[S, C]: see `SamplingBatch.chosen`."""
        chosen = [self._chosen[row] for row in rows.tolist()]
        width = max(map(len, chosen))
        if not width:
            return None
        found = np.zeros((len(rows), width), np.int64)
        for place, ids in enumerate(chosen):
            found[place, : len(ids)] = ids
        return found

    def _uniforms(self, rows: Ints, lower: Ints, upper: Ints) -> npt.NDArray[np.float64]:
        """float64[S, W]: the random numbers of each of `rows` at every length from its `lower` on."""
        width = int((upper - lower).max()) + 1
        return uniforms(self._origin[rows][:, None], lower[:, None] + np.arange(width))

    def _biases_between(self, rows: Ints, lower: Ints, upper: Ints) -> tuple[Ints, Biases]:
        """(indices into `rows`, int64[k]; biases) of all entries that may count at lengths `lower` to `upper`."""
        last = self._last[rows]
        places = np.flatnonzero((lower < self._biased_until[rows]) | ((lower <= last) & (last <= upper)))
        if len(places) == 0:
            return NO_INTS, NO_BIASES
        found = [self._biases[rows[place]].between(int(lower[place]), int(upper[place])) for place in places.tolist()]
        return np.repeat(places, [len(each) for each in found]), _joined(*found)


def _biases(req: Req, ends: list[int]) -> Biases:
    """All biases of `req`, which the tokens `ends` would end.

    (1) Logit bias. (2) -inf for `ends` while the output is below its min_tokens. (3) Where tokens are forced, only
    `FORCE` for these; nothing else counts there, min_tokens neither (as in transformers).
    """
    params, first = req.params, req.prompt_len
    if not (params.logit_bias or params.min_tokens or req.forced_first or req.forced_last or req.not_first):
        return NO_BIASES
    last = first + req.max_new_tokens - 1
    # Between what is forced at both ends. An output of one token is first and last at once: the last decides.
    begin, end = first + bool(req.forced_first), last if req.forced_last else ALWAYS
    bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
    found = _joined(
        _ranged(list(params.logit_bias), bias, begin, end),
        _ranged(ends, np.full(len(ends), -np.inf, np.float32), begin, min(end, first + params.min_tokens)),
        _ranged(req.not_first, np.full(len(req.not_first), -np.inf, np.float32), begin, min(end, first + 1)),
        _ranged(req.forced_first, np.full(len(req.forced_first), FORCE), first, min(end, first + 1)),
        _ranged(req.forced_last, np.full(len(req.forced_last), FORCE), last, last + 1),
    )
    return found.of(found.first < found.end)


def _ranged(tokens: Sequence[int], values: Floats, first: int, end: int) -> Biases:
    count = len(tokens)
    return Biases(np.array(tokens, np.int64), values, np.full(count, first), np.full(count, end))


def _joined(*biases: Biases) -> Biases:
    columns = zip(*((each.tokens, each.values, each.first, each.end) for each in biases), strict=True)
    return Biases(*map(np.concatenate, columns))
