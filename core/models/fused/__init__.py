"""Kernels that do in one pass what a transformers layer does in several, and the layers that they stand in for."""
