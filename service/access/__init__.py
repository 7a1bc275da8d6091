"""Callers: their tokens, certificates and names, what they may call, and the files that say so."""
