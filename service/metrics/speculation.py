"""Metrics of drafts: those of vLLM (`vllm:spec_decode_*`) under their names there, and others beside them."""

from __future__ import annotations

from service.metrics.metric import Metric

_PREFIX = "slipstream_spec_decode"

SINGLES: tuple[Metric, ...] = (
    Metric(f"{_PREFIX}_steps", "counter", "Steps that verified drafts; 0 where speculation is off.", field="steps"),
    Metric(f"{_PREFIX}_num_drafts", "counter", "Times that an output had drafts in a step.", field="rows"),
    Metric(f"{_PREFIX}_num_draft_tokens", "counter", "Drafts that steps have verified.", field="tokens"),
    Metric(
        f"{_PREFIX}_num_accepted_tokens",
        "counter",
        "Drafts that were the very token that the model samples there.",
        field="accepted",
    ),
    Metric(
        f"{_PREFIX}_num_dropped_tokens",
        "counter",
        "Tokens of steps with drafts that stood behind the end of their output.",
        field="dropped",
    ),
    Metric(
        f"{_PREFIX}_most_drafts",
        "gauge",
        "The most drafts that an output had in the last step; 0 where it verified none.",
        field="most",
    ),
    Metric(
        f"{_PREFIX}_draft_seconds",
        "counter",
        "Seconds of steps in which drafts were made; noting prompts is not among them.",
        field="draft_seconds",
    ),
    Metric(
        f"{_PREFIX}_verify_seconds",
        "counter",
        "Seconds of the steps that verified drafts, without those in which they made new ones.",
        field="verify_seconds",
    ),
)
"""Metrics that are one number of `DraftStats`."""

ACCEPTANCE_LENGTH = Metric(
    f"{_PREFIX}_acceptance_length",
    "histogram",
    "Tokens that an output with drafts got of one step: the drafts that were right, and one more.",
    field="lengths",
)

BY_POSITION: tuple[Metric, ...] = (
    Metric(
        f"{_PREFIX}_num_draft_tokens_per_pos",
        "counter",
        "Drafts that steps have verified, by how many stood before them.",
        ("position",),
        field="proposed_by_position",
    ),
    Metric(
        f"{_PREFIX}_num_accepted_tokens_per_pos",
        "counter",
        "Of these, the ones that were the very token that the model samples there.",
        ("position",),
        field="accepted_by_position",
    ),
)
"""Metrics that are a tuple of `DraftStats`, with a place for each position: at most `--speculative-drafts`."""
