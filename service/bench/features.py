"""The features of requests in `slipstream bench overlap --with`, which could make the device wait for the host."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from core.types.constraint import Constraint, ConstraintKind
from core.types.io import GenerateRequest
from core.types.sampling_params import SamplingParams

RECORDS = """{"type": "array", "minItems": 1000, "items": {"type": "object", "additionalProperties": false,
"required": ["id", "name", "score"], "properties": {"id": {"type": "integer"}, "name": {"type": "string"},
"score": {"enum": [0, 1, 2]}}}}"""
"""At least 1000 records, so that every request is still inside its grammar when the run is over."""


@dataclass(frozen=True)
class Feature:
    """One feature of requests, as what it changes in a plain request."""

    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that it sets."""
    constraint: Constraint | None = None
    want_text: bool = False
    is_checked: bool = True
    """Whether tokens are still those that the emulated model prefers, so that the benchmark can check them."""
    grammar_backend: str = "auto"
    """`GrammarConfig.backend` of the engine that serves such requests."""

    @property
    def n(self) -> int:
        """Outputs of each request."""
        return int(self.sampling.get("n", 1))

    def request(self, prompt: list[int], sampling: SamplingParams) -> GenerateRequest:
        """The request for the continuation of `prompt`."""
        return GenerateRequest(
            token_ids=tuple(prompt),
            sampling=dataclasses.replace(sampling, **self.sampling),
            constraint=self.constraint,
            want_text=self.want_text,
        )


PLAIN = Feature()

CONSTRAINED = {"ignore_eos": False}
LOGPROBS = {"logprobs": True, "top_logprobs": 5}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2}
STOP = {"stop": ("\n\n\nnever", "</s></s>"), "stop_token_ids": ()}
N = {"n": 4}

SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, RECORDS)

FEATURES: dict[str, Feature] = {
    "grammar": Feature(CONSTRAINED, SCHEMA, is_checked=False),
    "xgrammar": Feature(CONSTRAINED, SCHEMA, is_checked=False, grammar_backend="xgrammar"),
    "logprobs": Feature(LOGPROBS),
    "penalties": Feature(PENALTIES, is_checked=False),
    "stop": Feature(STOP, want_text=True),
    "n": Feature(N),
    "all": Feature({**CONSTRAINED, **LOGPROBS, **PENALTIES, **STOP, **N}, SCHEMA, want_text=True, is_checked=False),
}
"""By the name that `--with` takes."""
