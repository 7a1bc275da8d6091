"""Causal language models of transformers, unmodified, over our pools: probed and proved at load."""
