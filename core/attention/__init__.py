"""Attention over paged KV, one file per backend behind one contract."""
