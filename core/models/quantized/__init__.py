"""Checkpoints with quantised weights: which methods are served, and what makes a loaded one servable."""
