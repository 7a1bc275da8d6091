"""What requests of `slipstream bench overlap --with` ask for, that could make the device wait for the host."""

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
"""Records without end, so that every request is still in its grammar when the run is over."""


@dataclass(frozen=True)
class Feature:
    """One way of asking. `is_checked`: the tokens are still those that the emulated model prefers."""

    sampling: dict[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    want_text: bool = False
    is_checked: bool = True

    def request(self, prompt: list[int], sampling: SamplingParams) -> GenerateRequest:
        """The request for the continuation of `prompt`."""
        return GenerateRequest(
            token_ids=tuple(prompt),
            sampling=dataclasses.replace(sampling, **self.sampling),
            constraint=self.constraint,
            want_text=self.want_text,
        )


PLAIN = Feature()

FEATURES: dict[str, Feature] = {
    "grammar": Feature(
        {"ignore_eos": False}, Constraint(ConstraintKind.JSON_SCHEMA, RECORDS), want_text=False, is_checked=False
    ),
    "logprobs": Feature({"logprobs": True, "top_logprobs": 5}),
    "penalties": Feature(
        {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2}, is_checked=False
    ),
    "stop": Feature({"stop": ("\n\n\nnever", "</s></s>"), "stop_token_ids": ()}, want_text=True),
}
"""By the name that `--with` takes."""
