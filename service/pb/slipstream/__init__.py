"""Namespace of the generated `slipstream.v1` package."""
