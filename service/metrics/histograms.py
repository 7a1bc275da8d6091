"""The histograms of the engine's snapshot: what each of them measures."""

from __future__ import annotations

from service.metrics.metric import Metric

HISTOGRAMS: dict[str, Metric] = {
    field: Metric(f"slipstream_{field}", "histogram", help, field=field)
    for field, help in (
        ("time_to_first_token_seconds", "From a request's arrival to its first token."),
        ("inter_token_latency_seconds", "Between two tokens of one output."),
        ("request_time_per_output_token_seconds", "Of one output, the mean between its tokens after the first."),
        ("queue_time_seconds", "From a request's arrival to its first forward step."),
        ("request_prefill_time_seconds", "From a request's first forward step to its first token."),
        ("request_decode_time_seconds", "From a request's first token to its end."),
        ("e2e_request_latency_seconds", "From a request's arrival to its end."),
        ("adapter_load_seconds", "From a call that loads a LoRA adapter to its first possible use."),
        ("grammar_compile_seconds", "Of a constraint's compile, the wait for its turn included."),
        (
            "embedding_latency_seconds",
            "From an Embed, Classify or Score call's arrival to the answer for one input.",
        ),
        ("request_prompt_tokens", "Prompt tokens of one output, cached ones included."),
        ("request_generation_tokens", "Tokens generated for one output that got any."),
        ("step_duration_seconds", "Of one forward step on the device."),
        ("step_tokens", "Tokens that one forward step computes."),
        ("step_requests", "Requests in one forward step."),
    )
}
"""By their key in `EngineStats.histograms`. Latencies of a request that is traced have exemplars."""
