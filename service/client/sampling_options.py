"""The options of a request's outputs by the names and types that `SamplingParams` of the API has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """All may be left out: the checkpoint's own defaults count then. What each means is in the API reference.

    A misspelt name is an error of a type checker, and a ValueError at run time.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int
    n: int
    logit_bias: Mapping[int, float]
    logprobs: bool
    top_logprobs: int
    skip_special_tokens: bool
    include_stop_in_output: bool
    logprob_token_ids: Sequence[int]
    prompt_logprobs: int
