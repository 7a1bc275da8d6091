"""What a client asks of the sampler, fully resolved: no field is optional once the engine holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from core.errors import FieldViolation

MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 64
MAX_LOGPROB_TOKEN_IDS = 1024
MAX_PROMPT_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_TOKENS_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request; field names and meanings are those of vLLM and SGLang.

    `temperature == 0` means greedy. `top_k == 0` and `top_p == 1` and `min_p == 0` switch their filter off.
    `max_tokens is None` means "until the context is full". `seed is None` lets the engine draw one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    skip_special_tokens: bool = True
    include_stop_in_output: bool = False
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log probability is told at every place."""
    prompt_logprobs: int | None = None
    """How many alternatives come with the log probability of each prompt token; None for no log probabilities."""

    @property
    def greedy(self) -> bool:
        """Whether the next token is the arg max and no uniform is drawn."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def violations(self, vocab_size: int, prefix: str = "sampling_params") -> list[FieldViolation]:
        """Every field out of range, named by its protobuf path; empty when the parameters can be served."""
        found = [*self._scalar_violations(), *self._collection_violations(vocab_size)]
        return [FieldViolation(f"{prefix}.{name}", text) for name, text in found]

    def _scalar_violations(self) -> list[tuple[str, str]]:
        # `not (low <= x <= high)` on purpose: NaN must fail, and it passes `x < low or x > high`.
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("temperature", self.temperature, 0.0, MAX_TEMPERATURE),
            ("min_p", self.min_p, 0.0, 1.0),
            ("top_k", self.top_k, 0, MAX_TOKENS_LIMIT),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT),
            ("n", self.n, 1, MAX_N),
            ("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0, MAX_PROMPT_LOGPROBS),
        )
        found = [
            (name, f"must be between {low:g} and {high:g}")
            for name, value, low, high in bounds
            if not (low <= value <= high)
        ]
        if not (0.0 < self.top_p <= 1.0):
            found.append(("top_p", "must be above 0 and at most 1"))
        if not (0.0 < self.repetition_penalty <= 10.0):
            found.append(("repetition_penalty", "must be above 0 and at most 10"))
        if self.max_tokens is not None and not (1 <= self.max_tokens <= MAX_TOKENS_LIMIT):
            found.append(("max_tokens", "must be at least 1"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            found.append(("min_tokens", "must not exceed max_tokens"))
        if self.seed is not None and not (0 <= self.seed < 2**63):
            found.append(("seed", "must be between 0 and 2^63 - 1"))
        if self.top_logprobs > 0 and not self.logprobs:
            found.append(("top_logprobs", "needs logprobs to be true"))
        if self.logprob_token_ids and not self.logprobs:
            found.append(("logprob_token_ids", "needs logprobs to be true"))
        return found

    def _collection_violations(self, vocab_size: int) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        if len(self.stop) > MAX_STOP_STRINGS:
            found.append(("stop", f"at most {MAX_STOP_STRINGS} stop strings"))
        for i, text in enumerate(self.stop[:MAX_STOP_STRINGS]):
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                found.append((f"stop[{i}]", f"must have 1 to {MAX_STOP_STRING_CHARS} characters"))
        for name, ids, most in (
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS),
        ):
            if len(ids) > most:
                found.append((name, f"at most {most} ids"))
            outside = (i for i, token in enumerate(ids[:most]) if not 0 <= token < vocab_size)
            found += [(f"{name}[{i}]", f"must be between 0 and {vocab_size - 1}") for i in outside]
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            found.append(("logit_bias", f"at most {MAX_LOGIT_BIAS} entries"))
            return found
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                found.append((f"logit_bias[{token}]", f"token id must be between 0 and {vocab_size - 1}"))
            elif not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                found.append((f"logit_bias[{token}]", "must be between -100 and 100"))
        return found
