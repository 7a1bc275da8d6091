"""Metrics of pauses, weight updates and sleep."""

from __future__ import annotations

from service.metrics.metric import Metric

ACTIVITY = Metric(
    "slipstream_activity",
    "gauge",
    "1 for what the engine does: serving, paused (requests wait), refusing (paused, requests are refused), asleep.",
    ("activity",),
)
WEIGHTS_INFO = Metric(
    "slipstream_weights_info", "gauge", "Always 1; the label names the weights that are served.", ("weight_version",)
)
SINGLES: tuple[Metric, ...] = (
    Metric(
        "slipstream_weight_updates",
        "counter",
        "Times that other weights took the place of those that were served.",
        field="weight_updates",
    ),
    Metric(
        "slipstream_weight_update_failures",
        "counter",
        "Weight updates that ended with an error; the old weights went on serving.",
        field="weight_update_failures",
    ),
    Metric(
        "slipstream_restart_preemptions",
        "counter",
        "Requests put back in the queue before other weights or sleep, to be computed again.",
        field="restart_preemptions",
    ),
)
"""Metrics that are one number of `EngineStats`."""
