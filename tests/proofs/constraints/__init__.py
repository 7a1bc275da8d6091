"""Structured output: grammars by themselves, and outputs over gRPC."""
