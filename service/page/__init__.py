"""A read-only page for people on the metrics port: pools, queue, streams, and the last steps as lanes."""
