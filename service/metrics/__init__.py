"""Prometheus metrics: names, a collector over the engine's snapshot, counters of calls, and their own HTTP server."""
