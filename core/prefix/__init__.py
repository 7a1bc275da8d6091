"""Prefix caches: which KV pages already hold the beginning of a new prompt."""
