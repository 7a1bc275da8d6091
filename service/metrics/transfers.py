"""Metrics of keys that travel between servers that prefill and servers that decode; all 0 for a server of no role."""

from __future__ import annotations

from service.metrics.metric import Metric

_PREFIX = "slipstream_transfer"

SINGLES: tuple[Metric, ...] = (
    Metric(
        f"{_PREFIX}_kept_prompts",
        "gauge",
        "Prompts whose keys wait in host memory for the server that decodes.",
        field="kept",
    ),
    Metric(f"{_PREFIX}_given_prompts", "counter", "Prompts whose keys a server that decodes has got.", field="given"),
    Metric(
        f"{_PREFIX}_lost_prompts",
        "counter",
        "Prompts whose keys no server got: there was no room for them, or none asked in time.",
        field="lost",
    ),
    Metric(
        f"{_PREFIX}_given_tokens",
        "counter",
        "Tokens of the prompts that were given away, those included of which the other server had the keys.",
        field="given_tokens",
    ),
    Metric(f"{_PREFIX}_taken_requests", "counter", "Requests that went on from keys of another server.", field="taken"),
    Metric(f"{_PREFIX}_taken_tokens", "counter", "Tokens whose keys came of another server.", field="taken_tokens"),
    Metric(
        f"{_PREFIX}_evicted_requests",
        "counter",
        "Requests whose cached beginning was given up while the rest of their keys was on its way.",
        field="evicted",
    ),
)
"""Metrics that are one number of `TransferStats`."""

FAILURES = Metric(
    f"{_PREFIX}_failures",
    "counter",
    "Requests whose keys did not arrive, so that their prompt was computed here, or they were refused; by reason.",
    ("reason",),
    field="failures",
)
