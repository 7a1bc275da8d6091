"""Which values of each sampling option are served: up to its bounds, not beyond, and never what is not a number."""

from __future__ import annotations

import math
from typing import Any

import pytest

from core.types.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TOKENS_LIMIT,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)

VOCAB = 100
TINY = math.ulp(0.0)
ABOVE = math.nextafter(1.0, 2.0)

BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0.0, MAX_TEMPERATURE], [-TINY, 100.1, math.nan, math.inf]),
    ("min_p", [0.0, 1.0], [-TINY, ABOVE, math.nan]),
    ("top_p", [TINY, 1.0], [0.0, ABOVE, math.nan]),
    ("top_k", [0, MAX_TOKENS_LIMIT], [-1, MAX_TOKENS_LIMIT + 1]),
    ("repetition_penalty", [TINY, 10.0], [0.0, 10.1, math.nan]),
    ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
    ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
    ("max_tokens", [None, 1, MAX_TOKENS_LIMIT], [0, MAX_TOKENS_LIMIT + 1]),
    ("min_tokens", [0, MAX_TOKENS_LIMIT], [-1, MAX_TOKENS_LIMIT + 1]),
    ("n", [1, MAX_N], [0, MAX_N + 1]),
    ("seed", [None, 0, 2**63 - 1], [-1, 2**63]),
]


def bad(**options: Any) -> list[str]:
    """Fields that are refused."""
    return [each.field for each in SamplingParams(**options).violations(VOCAB, "s")]


@pytest.mark.parametrize(("name", "fine", "wrong"), BOUNDS, ids=[name for name, _, _ in BOUNDS])
def test_an_option_is_served_up_to_its_bounds(name: str, fine: list[Any], wrong: list[Any]) -> None:
    assert [bad(**{name: value}) for value in fine] == [[] for _ in fine]
    assert [bad(**{name: value}) for value in wrong] == [[f"s.{name}"] for _ in wrong]


def test_options_that_need_each_other() -> None:
    assert bad(min_tokens=3, max_tokens=3) == [] and bad(min_tokens=4, max_tokens=3) == ["s.min_tokens"]
    assert bad(top_logprobs=MAX_TOP_LOGPROBS, logprobs=True) == [] and bad(top_logprobs=1) == ["s.top_logprobs"]


def test_stops_are_few_short_and_ids_of_the_vocabulary() -> None:
    longest = "x" * MAX_STOP_STRING_CHARS
    assert bad(stop=(longest,) * MAX_STOP_STRINGS, stop_token_ids=(0, VOCAB - 1) * (MAX_STOP_TOKEN_IDS // 2)) == []
    assert bad(stop=("a", "", longest + "x")) == ["s.stop[1]", "s.stop[2]"]
    assert bad(stop=("a",) * (MAX_STOP_STRINGS + 1)) == ["s.stop"]
    assert bad(logprobs=True, logprob_token_ids=(0, VOCAB - 1) * (MAX_LOGPROB_TOKEN_IDS // 2)) == []
    assert bad(logprobs=True, logprob_token_ids=(-1, 0, VOCAB)) == ["s.logprob_token_ids[0]", "s.logprob_token_ids[2]"]
    assert bad(logprobs=True, logprob_token_ids=(0,) * (MAX_LOGPROB_TOKEN_IDS + 1)) == ["s.logprob_token_ids"]
    assert bad(logprob_token_ids=(0,)) == ["s.logprob_token_ids"]
    assert bad(prompt_logprobs=0) == bad(prompt_logprobs=20) == []
    assert bad(prompt_logprobs=-1) == bad(prompt_logprobs=21) == ["s.prompt_logprobs"]
    assert bad(stop_token_ids=(-1, 0, VOCAB)) == ["s.stop_token_ids[0]", "s.stop_token_ids[2]"]
    assert bad(stop_token_ids=(0,) * (MAX_STOP_TOKEN_IDS + 1)) == ["s.stop_token_ids"]


def test_bias_is_finite_bounded_and_on_tokens_of_the_vocabulary() -> None:
    assert bad(logit_bias={0: -100.0, VOCAB - 1: 100.0}) == []
    for wrong in ({VOCAB: 0.0}, {-1: 0.0}, {5: 100.5}, {5: math.nan}, {5: math.inf}):
        assert bad(logit_bias=wrong) == [f"s.logit_bias[{next(iter(wrong))}]"]
    assert bad(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)) == ["s.logit_bias"]
