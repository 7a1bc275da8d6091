"""What requests may ask of sampling: one entry for each kind of option, for tests that compare outputs.

Their tests end no output at its end of sequence, except where an entry asks for it.
"""

from __future__ import annotations

from typing import Any

SAMPLING_MATRIX: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.9},
    "hot": {"temperature": 3.0},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.5, "top_k": 5},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "filters": {"temperature": 1.1, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.7},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 1.5},
    "presence_penalty": {"temperature": 0.7, "presence_penalty": 1.5},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    "logit_bias": {"temperature": 0.8, "logit_bias": {7: 6.0, 9: -100.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 12, "ignore_eos": False},
    "stop_token_ids": {"temperature": 1.0, "stop_token_ids": tuple(range(20, 60)), "ignore_eos": False},
    "logprobs": {"temperature": 1.0, "logprobs": True, "top_logprobs": 3},
    "logprob_token_ids": {"temperature": 1.0, "logprobs": True, "logprob_token_ids": (9, 3, 9)},
}
