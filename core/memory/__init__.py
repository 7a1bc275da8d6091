"""Pools: request rows, KV pages and the table between them. Slot 0 of every pool is padding."""
