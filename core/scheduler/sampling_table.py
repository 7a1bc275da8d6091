"""Sampling options by row, so that the options of a whole step are a few array reads."""

from __future__ import annotations

import numpy as np

from core.batch.sampling_batch import SamplingBatch
from core.invariants import check
from core.sampling.uniform import uniforms
from core.types.arrays import Ints
from core.types.request import Req

NO_INTS: Ints = np.empty(0, np.int64)
NO_FLOATS = np.empty(0, np.float32)

FORCE = np.float32(1e9)
"""Bias of a forced token: beyond any logit, and still finite after any temperature and penalty."""

STOP_BITS = 64
"""Bits of the word per row that sums up its stop ids."""


class SamplingTable:
    """One column per option, indexed by row. `fill` at admission, `batch` at every step."""

    def __init__(self, num_rows: int, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        floats = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
        self._floats = {name: np.zeros(num_rows, np.float32) for name in floats}
        self._top_k: Ints = np.zeros(num_rows, np.int64)
        self._seed: Ints = np.zeros(num_rows, np.int64)
        self._prompt_len: Ints = np.zeros(num_rows, np.int64)
        self._min_tokens: Ints = np.zeros(num_rows, np.int64)
        self._top_logprobs: Ints = np.zeros(num_rows, np.int64)
        self._logprobs = np.zeros(num_rows, np.bool_)
        self._penalised = np.zeros(num_rows, np.bool_)
        self._biased = np.zeros(num_rows, np.bool_)
        self._stop_bits = np.zeros(num_rows, np.uint64)
        """Bit b is set if some stop id is b modulo 64, so that most tokens need no comparison with the ids."""
        self._constrained = np.zeros(num_rows, np.bool_)
        self._bias: list[tuple[Ints, np.ndarray]] = [(NO_INTS, NO_FLOATS)] * num_rows
        """By row: the logit bias, as token ids int64[k] and values float32[k]."""
        self._blocked: list[Ints] = [NO_INTS] * num_rows
        """By row: token ids that would end an output, not allowed before its min_tokens."""
        self._forced_at: Ints = np.full((num_rows, 2), -1, np.int64)
        """By row: the output positions, first and last, at which `_forced` decides; -1 for none."""
        self._forced: list[tuple[Ints, Ints]] = [(NO_INTS, NO_INTS)] * num_rows
        """By row: the token ids allowed at the first output position, and those at the last."""

    def fill(self, req: Req) -> None:
        """Take over the options of `req`, which now owns `req.row`.

        Raises InvariantViolation if an id to be biased, blocked or forced is not in the vocabulary.
        """
        row, params = req.row, req.params
        for name, column in self._floats.items():
            column[row] = getattr(params, name)
        self._top_k[row] = params.top_k
        self._seed[row] = req.seed
        self._prompt_len[row] = req.prompt_len
        self._min_tokens[row] = params.min_tokens
        self._logprobs[row] = params.logprobs
        self._top_logprobs[row] = params.top_logprobs
        self._penalised[row] = params.penalised
        self._biased[row] = bool(params.logit_bias)
        # Of a set: ids that share a bit count once.
        self._stop_bits[row] = sum({1 << token % STOP_BITS for token in params.stop_token_ids})
        self._constrained[row] = req.grammar is not None
        tokens = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._bias[row] = (tokens, values)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}
        self._blocked[row] = np.fromiter(sorted(ends), np.int64, len(ends))
        last = req.max_new_tokens - 1
        self._forced_at[row] = 0 if req.forced_first else -1, last if req.forced_last else -1
        self._forced[row] = np.array(req.forced_first, np.int64), np.array(req.forced_last, np.int64)
        self._check_indices(row)

    def _check_indices(self, row: int) -> None:
        """Check that each id to be written into the row's logits is inside them: else CUDA would end the process."""
        ids = np.concatenate([self._bias[row][0], self._blocked[row], *self._forced[row]])
        inside = not len(ids) or bool(ids.min() >= 0 and ids.max() < self._vocab_size)
        check("bias_in_logits", inside, row=row, vocab_size=self._vocab_size)

    def may_stop(self, rows: Ints, tokens: Ints) -> np.ndarray:
        """bool[n]: whether `tokens[i]` could be a stop id of `rows[i]`, int64[n] both. Never False for one that is."""
        bits = self._stop_bits[rows] >> (tokens % STOP_BITS).astype(np.uint64)
        found: np.ndarray = (bits & np.uint64(1)).astype(np.bool_)
        return found

    def batch(self, rows: Ints, seq_lens: Ints) -> SamplingBatch:
        """Options of `rows` int64[S], for the tokens at absolute positions `seq_lens` int64[S]."""
        columns = {name: column[rows] for name, column in self._floats.items()}
        top_ks, outputs = self._top_k[rows], seq_lens - self._prompt_len[rows]
        random = columns["temperature"] > 0
        all_greedy = not random.any()
        logprobs = self._logprobs[rows]
        any_logprobs = bool(logprobs.any())
        bias_rows, bias_tokens, bias_values = self._biases(rows, outputs)
        return SamplingBatch(
            rows=rows,
            temperatures=columns["temperature"],
            top_ks=top_ks,
            top_ps=columns["top_p"],
            min_ps=columns["min_p"],
            uniforms=np.zeros(len(rows)) if all_greedy else uniforms(self._seed[rows], outputs),
            repetition_penalties=columns["repetition_penalty"],
            frequency_penalties=columns["frequency_penalty"],
            presence_penalties=columns["presence_penalty"],
            prompt_lens=self._prompt_len[rows],
            history_lens=seq_lens,
            bias_rows=bias_rows,
            bias_tokens=bias_tokens,
            bias_values=bias_values,
            all_greedy=all_greedy,
            any_top_k=bool((random & (top_ks > 0)).any()),
            any_top_p=bool((random & (columns["top_p"] < 1)).any()),
            any_min_p=bool((random & (columns["min_p"] > 0)).any()),
            any_penalty=bool(self._penalised[rows].any()),
            logprobs=any_logprobs,
            top_logprobs=int(self._top_logprobs[rows].max(initial=0)),
            constrained=np.flatnonzero(self._constrained[rows]),
            alternatives=np.where(logprobs, self._top_logprobs[rows], -1) if any_logprobs else None,
        )

    def _biases(self, rows: Ints, outputs: Ints) -> tuple[Ints, Ints, np.ndarray]:
        """(indices into `rows` int64[k], token ids int64[k], values float32[k]) to be added to logits.

        (1) Logit bias. (2) -inf for tokens that would end an output still below its min_tokens. (3) Where tokens are
        forced, only `FORCE` for these; nothing else counts there, min_tokens neither (as in transformers).
        """
        blocked = outputs < self._min_tokens[rows]
        forced = self._forced_at[rows] == outputs[:, None]
        places = np.flatnonzero(self._biased[rows] | blocked | forced.any(axis=1))
        if len(places) == 0:
            return NO_INTS, NO_INTS, NO_FLOATS
        parts: list[tuple[int, Ints, np.ndarray]] = []
        for place in places.tolist():
            row = int(rows[place])
            if forced[place].any():
                # An output of one token is first and last at once: the last decides.
                tokens = self._forced[row][int(forced[place, 1])]
                parts.append((place, tokens, np.full(len(tokens), FORCE)))
                continue
            parts.append((place, *self._bias[row]))
            if blocked[place]:
                ends = self._blocked[row]
                parts.append((place, ends, np.full(len(ends), -np.inf, np.float32)))
        counts = [len(tokens) for _, tokens, _ in parts]
        return (
            np.repeat(np.asarray([place for place, _, _ in parts], np.int64), counts),
            np.concatenate([tokens for _, tokens, _ in parts]),
            np.concatenate([values for _, _, values in parts]),
        )
