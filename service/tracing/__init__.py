"""Spans of requests, for OpenTelemetry where it is installed and asked for, and the caller's trace context always."""
