"""Attention over paged KV in Triton: kernels that find every key through the request table by themselves."""
