"""Metrics, traces, dashboard and alerts, seen by the tools that operators use: Prometheus, promtool, OTLP, Perfetto."""
