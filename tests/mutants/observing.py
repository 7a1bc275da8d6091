"""Mutants of what is told to operators: metrics, lanes, spans."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COLLECTOR, TRACE, SPANS = (f"tests/metrics/test_{name}.py::" for name in ("collector", "trace", "spans"))

OBSERVING: tuple[Mutant, ...] = (
    Mutant(
        "full-window-pool-unseen",
        "utilisation is that of the fullest pool",
        "service/metrics/collector.py",
        "return max(shares, default=0.0)",
        "return min(shares, default=0.0)",
        COLLECTOR + "test_the_fullest_memory_pool_is_the_utilisation",
    ),
    Mutant(
        "stale-histogram-shown",
        "a scrape shows every observation of its step",
        "core/histogram.py",
        "            self._exemplars[place] = Exemplar(trace_id, value)\n        self._shown = None\n",
        "            self._exemplars[place] = Exemplar(trace_id, value)\n",
        COLLECTOR + "test_one_value_or_an_array_count_alike",
    ),
    Mutant(
        "phase-counted-twice",
        "the phases of a step add up to it",
        "core/scheduler/phases.py",
        "            recording.scheduler.add(self._last, now, step, phase, tokens)\n        self._last = now\n",
        "            recording.scheduler.add(self._last, now, step, phase, tokens)\n",
        COLLECTOR + "test_phases_add_up_and_are_slices_while_somebody_records",
    ),
    Mutant(
        "device-clock-by-the-slowest-copy",
        "no copy ends later than the host notices it, and the quickest notice is the closest",
        "core/executor/step_lanes.py",
        "min(recording.device_offset, offset)",
        "offset",
        TRACE + "test_device_times_become_the_hosts_by_the_quickest_copy",
    ),
    Mutant(
        "traces-for-everybody",
        "by default only this machine is given a trace",
        "service/metrics/trace.py",
        ".is_loopback",
        ".version > 0",
        TRACE + "test_by_default_only_this_machine_is_given_a_trace",
    ),
    Mutant(
        "recording-never-ends",
        "nothing is recorded once the trace is written",
        "service/metrics/trace.py",
        "                lanes.stop()\n",
        "                pass\n",
        TRACE + "test_by_default_only_this_machine_is_given_a_trace",
    ),
    Mutant(
        "unsampled-traces-as-exemplars",
        "a trace that nobody keeps is no example",
        "service/tracing/trace_context.py",
        "flags & _SAMPLED and ",
        "",
        SPANS + "test_only_a_whole_trace_context_counts",
    ),
    Mutant(
        "callers-trace-ignored",
        "a span joins the caller's trace",
        "service/tracing/otlp.py",
        "parent = self._propagator.extract(carrier)",
        "parent = self._propagator.extract({})",
        SPANS + "test_a_span_joins_the_callers_trace_and_tells_what_happened_when",
    ),
    Mutant(
        "opentelemetry-always-imported",
        "nothing of OpenTelemetry is imported without an endpoint",
        "service/tracing/endpoint.py",
        "import importlib.util\n",
        "import importlib.util\n\nimport opentelemetry.trace  # noqa\n",
        SPANS + "test_nothing_is_imported_where_nobody_asked",
    ),
)
